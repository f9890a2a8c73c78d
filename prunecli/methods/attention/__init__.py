"""Sharing and dropping attentions (2309.01826, appendix B): which are merged, what the tensors are made of."""
