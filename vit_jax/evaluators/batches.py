"""A batch of examples."""

from jaxtyping import Array

# `image` float32 [batch, height, width, channels]; `label` int32 [batch], or float32
# [batch, classes], in evaluation of 0 and 1; `mask` [batch], 0 for padding and broken images.
Batch = dict[str, Array]
