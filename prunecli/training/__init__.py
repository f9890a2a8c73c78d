"""Training: recover a reduced model's quality, or train one from scratch, on transformers' Trainer."""
