"""Layer-major running: every batch goes through one layer, then that layer's weights give way to the next one's.

A forward pass is not suspended but begun anew for each layer, with the layers before it answering from what is kept:
`running` says how. `parts` builds the model with its layers left out, `reading` brings their weights in, `states`
keeps the batches, `budget` says what fits.
"""
