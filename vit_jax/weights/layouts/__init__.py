"""One module for each layout of weights."""
