"""Embedding tables: replaced by a DeFINE unit that is fitted to them (Mehta et al., arXiv 1911.12385)."""
