"""The Vision Transformer (arXiv 2010.11929) on JAX and Flax."""
