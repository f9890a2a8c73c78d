"""Attention heads: measured, chosen, removed (Michel et al., arXiv 1905.10650)."""
