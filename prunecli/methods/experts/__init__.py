"""Expert pruning of NLLB-200 (Koishekenov et al., arXiv 2212.09811)."""
