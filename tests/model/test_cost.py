"""Operations of a pass against those that torch counts while a model of the family runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from prunecli import load_model
from prunecli.architectures import FAMILIES
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import Products, model_dim, token_products
from prunecli.model.declared import Sizes
from prunecli.model.layout import resolve
from prunecli.model.structure import Structure
from tests.families import DECODERS, ENCODERS, stock_model, tiny_config_of
from tests.families.records import CASES
from tests.ffn_layouts import tiny, write_changed
from tests.structures import axes_of
from tests.tiny import tiny_nllb_moe

SENTENCES, SOURCE, TARGET = 2, 7, 5
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
"""Of activations and weights; those of attention's scores are bmm or sdpa."""


def counted(model: Any, model_type: str) -> tuple[int, int]:
    """Operations of matrix products in the layers, and in the output layer, of one pass."""
    device = next(model.parameters()).device
    source = torch.ones(SENTENCES, SOURCE, dtype=torch.long, device=device)
    target = torch.ones(SENTENCES, TARGET, dtype=torch.long, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        if model_type in ENCODERS:
            model(input_ids=source)
        elif model_type in DECODERS:
            model(input_ids=target)
        else:
            model(input_ids=source, decoder_input_ids=target, use_cache=False)
    layers = "|".join(pattern_of(stack.layers) for stack in FAMILIES[model_type].stacks)
    counts = counter.get_flop_counts()
    output = f"{type(model).__name__}.{FAMILIES[model_type].embedding.output}"  # type: ignore[union-attr]
    return (
        sum(products(found) for name, found in counts.items() if re.fullmatch(rf"\w+\.(?:{layers})", name)),
        products(counts.get(output, {})),
    )


def pattern_of(layers: str) -> str:
    return re.escape(layers).replace(r"\{layer\}", r"\d+")


def products(counts: Any) -> int:
    return sum(counts.get(operation, 0) for operation in PRODUCTS)


def reckoned(found: Products, model_type: str, *, output: bool) -> int:
    sources = 0 if model_type in DECODERS else SENTENCES * SOURCE
    targets = 0 if model_type in ENCODERS else SENTENCES * TARGET
    return found.operations(sources, sources, targets, output=output)


def check(model: Any, found: Products, model_type: str) -> None:
    layers, output = counted(model, model_type)
    assert layers > 0
    assert reckoned(found, model_type, output=False) == layers
    assert reckoned(found, model_type, output=True) == layers + output


@pytest.mark.parametrize("case", ["bart", "t5-gated", "bert", "gpt2", "gemma2", "phi3", "qwen3", "opt"])
def test_every_family_costs_what_torch_counts(case: str) -> None:
    config, model_type = tiny_config_of(case), CASES[case].model_type
    model = stock_model(config).to_empty(device="cpu").eval()
    for held in (*model.parameters(), *model.buffers()):
        held.data.zero_()
    check(model, token_products(resolve(FAMILIES[model_type], config, Structure())), model_type)


def of(directory: Path) -> Products:
    with open_model(directory) as opened:
        return token_products(resolve(opened.require_architecture(), opened.config, opened.structure))


def test_of_a_mixture_the_chosen_experts_and_the_router_count(tmp_path: Path) -> None:
    directory = tiny_nllb_moe(tmp_path / "moe", router_bias=True)
    check(load_model(directory, device="cpu"), of(directory), "nllb-moe")


def test_shared_ffns_count_as_often_as_they_run_and_removed_ones_not_at_all(tmp_path: Path) -> None:
    encoder, decoder = ([f"model.{side}.layers.{n}" for n in range(2)] for side in ("encoder", "decoder"))
    changes: dict[str, Any] = {
        encoder[1]: {"shared_with": encoder[0]},
        encoder[0]: {"width": 20},
        decoder[1]: {"removed": True},
    }
    directory = write_changed(tiny(tmp_path / "source", "bart"), tmp_path / "reduced", "bart", changes)
    check(load_model(directory, device="cpu"), of(directory), "bart")


def test_removed_heads_cost_nothing(tmp_path: Path) -> None:
    config = tiny_config_of("bart")
    name = "model.decoder.layers.0.encoder_attn"
    structure = Structure(axes_of("head", {name: (1,), "model.encoder.layers.1.self_attn": ()}, 4))
    full = token_products(resolve(FAMILIES["bart"], config, Structure()))
    less = token_products(resolve(FAMILIES["bart"], config, structure))
    d = config["d_model"]
    assert full.cross - less.cross == 2 * d * d * 3 // 4
    assert full.decoder - less.decoder == 2 * d * d * 3 // 4
    assert full.encoder - less.encoder == 4 * d * d


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_width_of_hidden_states_is_that_of_the_embeddings(model_type: str) -> None:
    family = FAMILIES[model_type]
    table = next(spec for spec in family.tensors if spec.name == f"{family.embedding.input}.weight")  # type: ignore[union-attr]
    assert Sizes(family, {}).count(model_dim(family)) == Sizes(family, {}).count(table.shape[1])
