"""The vocabulary: tokens counted in text, chosen, removed from embeddings and tokenizer files."""
