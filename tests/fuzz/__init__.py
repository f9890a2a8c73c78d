"""Hostile inputs and kills at random moments: `benchmarks/reliability.py` runs many rounds, the test suite a few."""
