"""Where the pixels come from and in which order; the only part of vit_jax that uses TensorFlow."""
