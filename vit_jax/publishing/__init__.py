"""A folder for the Hugging Face Hub: a model card, and the upload.

In: weights, the records of the run, fit or evaluation that they come from, and the folder that
weights.save writes. Out: the text of README.md, and a repository on the Hub. Imports errors, files,
data, models, evaluators, workdir, weights and fitting; the Hub's library only when it is needed.
"""

from vit_jax.publishing.card import FILE, make
from vit_jax.publishing.facts import Facts, read
from vit_jax.publishing.repository import FILES, check_name, listing, upload

__all__ = ['FILE', 'FILES', 'Facts', 'check_name', 'listing', 'make', 'read', 'upload']
