"""Models of the Hugging Face hub: which names mean one, and how its files become a checkpoint directory."""
