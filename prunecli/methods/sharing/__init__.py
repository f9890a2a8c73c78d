"""Sharing and dropping FFNs and attentions (2309.01826): options, which are merged, what the tensors are made of."""
