"""How batches go through a model: in memory, layer by layer, in several processes."""
