"""Running layer by layer: every batch goes through one layer, then that layer's weights give way to the next one's.

A forward pass is not suspended but begun anew for each layer, with the layers before it answering from what is kept:
`entering` says how, `forward` goes forwards, `gradients` forwards and back. `parts` builds the model with its layers
left out, `reading` brings their weights in, `states` keeps the batches, `budget` says what fits, `runner` has all of
it for a checkpoint and a given memory.
"""
