"""Random weights of a reduced model are those that its stock class draws, and there are as many as after reducing."""

import math
from pathlib import Path

import pytest
import torch
import transformers

from prunecli.methods.sharing.options import AttentionOptions, FfnOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.described import ConfiguredCheckpoint
from prunecli.model.rewrite import Rewrite
from prunecli.modules.define import DefineEmbedding, DefineOutput
from prunecli.modules.drawing import random_model
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from tests import factorised
from tests.contracts.method_contract import Decide, made_of
from tests.families.records import CASES, DISTINCT
from tests.ffn_layouts import tiny
from tests.opening import load
from tests.selections import kept_heads
from tests.tiny import config_of


def without_heads(source: Checkpoint) -> Rewrite:
    """Layers keep one head, none and two, in turn."""
    kept = ((1,), (), (0, 2))
    layers = source.layout.attentions
    return cut(source, kept_heads({layer.name: kept[number % 3] for number, layer in enumerate(layers)}))


def shared_attentions(source: Checkpoint) -> Rewrite:
    kinds = {layer.kind: "share" for layer in source.layout.attentions}
    return made_of(source, AttentionOptions(**kinds))


def drawn(source: Path, reduce: Decide) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The random model of what `reduce` writes, and the result itself, with weights."""
    opened = open_model(source)
    rewrite = made_of(opened, reduce)
    apply(opened, rewrite, "reduced")
    apply(opened, rewrite, "config", weights=False)
    configured = ConfiguredCheckpoint(Path("config/config.json"), config_of("config"))
    return random_model(configured, 0), load("reduced")


def stock_spread(source: Path) -> dict[str, tuple[float, int]]:
    """Parameter -> standard deviation and size in a random model of the stock class, unreduced."""
    config = transformers.AutoConfig.from_pretrained(source)
    torch.manual_seed(1)
    model = getattr(transformers, config.architectures[0])(config).float()
    return {
        name: (float(value.detach().std()), value.numel())
        for name, value in model.state_dict().items()
        if value.is_floating_point() and value.numel() > 1
    }


def alike(first: float, second: float, *sizes: int) -> bool:
    """Whether two sample deviations are of one distribution: within six standard errors."""
    error = math.sqrt(sum(1 / (2 * size) for size in sizes))
    return abs(first - second) <= 6 * error * max(first, second) + 1e-6


@pytest.mark.parametrize("case", DISTINCT)
@pytest.mark.parametrize(
    "reduce", [without_heads, FfnOptions(preset="OneWide", dense_only=True), shared_attentions]
)
def test_each_tensor_is_drawn_as_in_the_stock_class(case, reduce):
    source = tiny("model", case)
    model, loaded = drawn(source, reduce)
    assert {name: value.shape for name, value in model.named_parameters()} == {
        name: value.shape for name, value in loaded.named_parameters()
    }
    spread = stock_spread(source)
    is_t5 = CASES[case].model_type in ("t5", "mt5")
    compared = 0
    for name, value in model.named_parameters():
        if name not in spread or value.numel() < 2:
            continue
        (expected, size), found = spread[name], float(value.detach().std())
        if is_t5 and name.endswith((".wo.weight", ".o.weight")):  # by the width of their own input
            found *= math.sqrt(value.shape[1] / (size / value.shape[0]))
        assert alike(found, expected, size, value.numel()), (name, found, expected)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("case", "options"),
    [
        *((case, {}) for case in ("m2m_100", "t5", "gpt2", "llama", "gemma3_text")),
        ("llama", {"shared_blocks": True, "reduction": False, "expand_dim": None}),
    ],
)
def test_factorised_embeddings_give_rows_as_long_as_those_of_a_table(case, options):
    source = tiny("model", case)
    model, loaded = drawn(source, factorised.options(**options))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in loaded.named_parameters()]
    table = next(iter(CASES[case].input))
    expected, size = stock_spread(source)[f"{table}.weight"]
    unit = next(module for module in model.modules() if isinstance(module, DefineEmbedding))
    assert (unit.reduce is None) == ("reduction" in options)
    assert alike(float(unit.rows(0, unit.num_embeddings).std()), expected, size, size // 4)
    outputs = [module for module in model.modules() if isinstance(module, DefineOutput)]
    for output in outputs:
        rows = (output.weight @ output.project.weight).detach()
        assert float(rows.std()) == pytest.approx(float(output.weight.detach().std()), rel=0.3)
