"""Many processes act as one: they start, agree and stop together."""
