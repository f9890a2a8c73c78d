"""Fuzzing of the commands: damaged files, hubs and kills; `benchmarks/reliability.py` runs it."""
