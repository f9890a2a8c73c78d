"""Checkpoint directories as named tensors: read lazily, written as a stream. Knows no model family."""
