"""Evaluations of a model: batches in, numbers out."""
