"""Factorised checkpoints of every family, and what they should compute, restated with slow code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.methods.embeddings.options import EmbeddingOptions
from tests.contracts.method_contract import written
from tests.families import records
from tests.families.family import Family
from tests.ffn_layouts import weights
from tests.reference.define import groups, unit
from tests.tiny import config_of

SMALL = {"map_dim": 4, "expand_dim": 12, "depth": 2, "max_groups": 2, "epochs": 1}


CASES = dict(records.CASES)
del CASES["bert-classifier"]  # which has no output layer over the vocabulary


def has_stock_cache(family: Family) -> bool:
    """Whether a stock config can say that the output has a table of its own, beside the input's."""
    return family.task != "translation" or not family.tied


def options(**given: Any) -> EmbeddingOptions:
    """Dimensions are small where none are given; a unit's are left out where there is none."""
    has_unit = given.get("side") != "output" and given.get("kind") != "projective"
    no_unit = {} if has_unit else dict.fromkeys(("expand_dim", "depth", "max_groups"))
    return EmbeddingOptions(**SMALL | no_unit | given)


def factorised(source: Path | str, output: Path | str, **given: Any) -> Path:
    return written(source, options(**given), output)


def cached(source: Path | str, output: Path | str) -> Path:
    return written(source, EmbeddingOptions(cache=True), output)


def expanded(held: Mapping[str, np.ndarray], name: str, *, padding: int | None, kind: str) -> np.ndarray:
    """Rows of the unit `name`."""
    own = {key.removeprefix(f"{name}."): value for key, value in held.items() if key.startswith(f"{name}.")}
    depth = sum(key.startswith("layers.") and key.endswith(".bias") for key in own)
    layers = []
    for number, count in enumerate(groups(kind, 2, depth)):
        blocks = [*own[f"layers.{number}.weight"]]
        layers.append((blocks * (count // len(blocks)), own[f"layers.{number}.bias"]))
    rows = unit(kind, own["map.weight"], layers, own.get("reduce.weight"), own.get("reduce.bias"))
    if padding is not None:
        rows[padding] = 0
    return rows


def replaced(model: Any, case: Family, directory: Path) -> Any:
    """`model`, the original one, with the tables that the factorised checkpoint in `directory` stands for."""
    import torch
    from torch import nn

    held, change = weights(directory), config_of(directory)["prunecli"]["embedding"]
    name = case.input[0]
    table = model.get_parameter(f"{name}.weight")
    output = model.get_submodule(case.output)
    own_output = nn.Parameter(output.weight.detach().clone())
    if "input" in change:
        padding = model.config.pad_token_id if change["input"]["zero_padding"] else None
        if change["input"]["cached"]:
            rows = held[f"{name}.weight"]
        else:
            rows = expanded(held, name, padding=padding, kind=change["input"]["kind"])
        table = nn.Parameter(torch.from_numpy(rows))
    for module in case.input:
        model.get_submodule(module).weight = table
    output.weight = own_output
    if (made := change.get("output")) is not None and made["map_dim"] is not None:
        mapped = held[f"{name}.map.weight" if made["tied"] else f"{case.output}.weight"]
        output.weight = nn.Parameter(torch.from_numpy(mapped @ held[f"{case.output}.project.weight"]))
    return model
