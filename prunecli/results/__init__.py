"""The JSON files that prunecli writes."""
