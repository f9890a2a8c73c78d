"""Removing whole layers: which matter least, what config.json and the tensors' names then say."""
