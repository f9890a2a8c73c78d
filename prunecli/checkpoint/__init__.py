"""Directories of tensors: a lazy reader, a streaming writer, and `Structure`, which says what was removed."""
