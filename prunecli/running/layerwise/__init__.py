"""Running layer by layer: every batch goes through one layer, then the next layer's weights replace that one's.

`modules.building` makes the model without weights, as layers and their experts; `reading` reads the weights; `states`
stores hidden states between layers, and snapshots of them; `forward` sends passes through the layers, and back;
`budget` computes what fits; `runner` runs a checkpoint within a given memory.
"""
