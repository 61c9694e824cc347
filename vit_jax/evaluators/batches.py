"""A batch of examples."""

from jaxtyping import Array

# `image` is float32 [batch, height, width, channels]. `label` is int32 [batch], or float32
# [batch, classes] with 0 and 1 in evaluation. `mask` [batch] is 0 for padding and broken images.
Batch = dict[str, Array]
