"""Which units of a model's axes stay, whatever kind they are of: selected, and cut out of the tensors."""
