"""Parallel text from files, tokens, length-bucketed batches."""
