"""What a checkpoint is: its structure, its family, and what both say of its layers and tensors."""
