"""The modules that a reduced model runs, and `load_model`."""
