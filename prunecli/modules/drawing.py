"""A model of random weights, whatever was removed from it or is shared in it: drawn as its stock class draws them."""

from typing import Any

import torch
from torch import nn

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.patchwork import OnlyBias, has_part, module_name
from prunecli.modules.building import assemble, complete
from prunecli.modules.define import DefineEmbedding, DefineOutput, GroupLinear
from prunecli.modules.saving import saving_as_stored
from prunecli.modules.sparse_ffn import SparseFFN
from prunecli.modules.stages import EmptyModel
from prunecli.private import init_weights

SAMPLED_ROWS = 1024
"""Rows of a table that say how long its rows are."""


def random_model(checkpoint: Checkpoint, seed: int) -> Any:
    """A model in float32 on the CPU whose weights are drawn, once each.

    Stock modules draw by the rule of their class (`init_weights`), those of another width by the rule for that width;
    an expert as a stock linear layer. The rows that a factorised embedding gives are as long as those of the table in
    whose place it stands, and so are the rows of a factorised output layer.

    Args:
        checkpoint: the structure and the sizes; its tensors are not read.
        seed: of the weights.

    Raises:
        CheckpointError: config.json says what cannot be, or a weight that nothing draws.
    """
    model = assemble(checkpoint, torch.float32)
    torch.manual_seed(seed)
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            drawn = nn.Parameter(torch.full(value.shape, torch.nan), requires_grad=value.requires_grad)
            setattr(module, name, drawn)
    with torch.no_grad():
        spreads = {}
        for module in model.modules():
            if isinstance(module, DefineEmbedding):
                table = nn.Embedding(SAMPLED_ROWS, module.embedding_dim)
                init_weights(model, table)
                spreads[module] = float(table.weight.std())
        model.initialize_weights()
        # Again what a rule of a whole FFN or attention drew by the sizes in the config, not by its own (T5's).
        for ffn in checkpoint.layout.ffns:
            if ffn.has_tensors and not ffn.is_sparse:
                _draw_with(model, ffn.name, ffn.spec.width, ffn.count)
        for attention in checkpoint.layout.attentions:
            if not attention.is_whole and attention.count:
                _draw_with(model, attention.name, attention.spec.heads, attention.count)
        for module in model.modules():
            _draw(model, module)
        for unit, spread in spreads.items():
            # Scale the last linear step so that the rows have this standard deviation. Where a residual connection
            # adds to that step, the rows only come nearer to the deviation.
            last = unit.group_layer(len(unit.layers) - 1)[0] if unit.reduce is None else unit.reduce.weight
            last.mul_(spread / unit.rows(0, min(SAMPLED_ROWS, unit.num_embeddings)).std())
    complete(EmptyModel(model, (), (), torch.device("cpu"), ""))
    if undrawn := [name for name, value in model.named_parameters() if not bool(value.isfinite().all())]:
        raise CheckpointError(f"{checkpoint.path}: nothing draws the weights of {undrawn[0]}")
    return saving_as_stored(model, checkpoint, checkpoint.config)


def _draw_with(model: Any, name: str, key: str, value: int) -> None:
    name, stated = module_name(model, name), getattr(model.config, key, value)
    if stated == value or not has_part(model, name):
        return
    setattr(model.config, key, value)
    for module in reversed([*model.get_submodule(name).modules()]):  # what holds others draws after them
        init_weights(model, module)
    setattr(model.config, key, stated)


def _draw(model: Any, module: nn.Module) -> None:
    """The parameters of a module of prunecli's own, which stock rules do not know."""
    if isinstance(module, SparseFFN):
        _as_linear(model, module.fc1_weight, module.fc1_bias)
        _as_linear(model, module.fc2_weight, module.fc2_bias)
    elif isinstance(module, OnlyBias) and module.bias is not None:
        nn.init.zeros_(module.bias)
    elif isinstance(module, DefineOutput):
        _as_linear(model, module.weight, module.bias)
        # logits (h P) U^T: the rows U P^T are then as long as those of a stock output layer
        nn.init.normal_(module.project.weight, std=module.project.out_features**-0.5)
    elif isinstance(module, GroupLinear):
        module.reset_parameters()


def _as_linear(model: Any, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    linear = nn.Linear(1, 1, device="meta")
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    init_weights(model, linear)
