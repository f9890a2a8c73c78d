"""What made files of the package; run from a checkout, never installed."""
