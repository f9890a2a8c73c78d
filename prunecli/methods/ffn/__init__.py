"""Sharing, dropping and resizing feed-forward networks (2309.01826): which are merged, what the tensors are made of."""
