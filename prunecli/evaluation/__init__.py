"""Beam-search decoding, scores with significance, the latency benchmark."""
