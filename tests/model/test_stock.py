"""Whether a stock class can run a result, why not, and what would come nearest."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from prunecli.model.changes import EmbeddingChange, InputChange, OutputChange
from prunecli.model.checkpoint import open_model
from prunecli.model.stock import stock_support, uniform_heads
from prunecli.model.structure import Structure
from tests.families import tiny_family
from tests.structures import axes_of

UNIT = InputChange("define", 8, 16, 2, 2)
NOT = "Not a stock model: "
UNIFORM = "; `prune-heads --uniform` would give one."
LLAMA = [f"model.layers.{number}.self_attn" for number in range(3)]
GPT2 = [f"transformer.h.{number}.mlp" for number in range(3)]


def heads(names: list[str], *kept: tuple[int, ...]) -> Structure:
    return Structure(axes_of("head", dict(zip(names, kept, strict=True)), 4))


def embedding(**sides: Any) -> Structure:
    return Structure(embedding=EmbeddingChange(**sides))


@pytest.mark.parametrize(
    ("family", "structure", "line"),
    [
        ("llama", Structure(), "A stock model: plain transformers opens it."),
        (
            "llama",
            heads(LLAMA, (0,), (0, 1, 2), (0, 1)),
            "Not a stock model: heads differ between layers (1 to 3); `prune-heads --uniform` would give one.",
        ),
        (
            "llama",
            heads(LLAMA, (0, 1, 2), (0, 1, 2), (1, 2, 3)),
            "Not a stock model: transformers refuses 6 heads of a layer where hidden_size is 32, no multiple of it; "
            "`prune-heads --uniform` would give one.",
        ),
        ("llama", heads(LLAMA, (), (), ()), f"{NOT}no heads are left{UNIFORM}"),
        (
            "bart",
            heads(["model.encoder.layers.0.self_attn"], (0, 1)),
            "Not a stock model: heads were removed, and a config of type bart cannot say how many.",
        ),
        (
            "t5",  # all heads, but not in the order of the shared table of positions
            heads(["encoder.block.0.layer.0.SelfAttention"], (1, 0, 2, 3)),
            "Not a stock model: heads were removed, and a config of type t5 cannot say how many.",
        ),
        (
            "gpt2",
            Structure(removed=frozenset({GPT2[1]})),
            "Not a stock model: FFNs are removed, which no config.json can say.",
        ),
        (
            "gpt2",
            Structure(shared={GPT2[1]: GPT2[0]}),
            "Not a stock model: FFNs are shared, which no config.json can say.",
        ),
        (
            "gpt2",
            Structure(widths={GPT2[1]: 20}),
            "Not a stock model: the widths of FFNs differ (20 to 128).",
        ),
        (
            "gpt2",
            embedding(input=UNIT),
            "Not a stock model: the input embeddings are factorised; `factorize-embeddings --cache` would give one.",
        ),
        (
            "gpt2",
            embedding(input=UNIT, output=OutputChange(8)),
            "Not a stock model: the output embeddings are factorised.",
        ),
        (
            "gpt2",
            embedding(input=UNIT, output=OutputChange()),
            "Not a stock model: the input embeddings are factorised; `factorize-embeddings --cache` would give one.",
        ),
        (
            "bart",
            embedding(output=OutputChange()),
            "Not a stock model: the output layer has a table of its own, which a config of type bart cannot say.",
        ),
        ("gpt2", embedding(output=OutputChange()), "A stock model: plain transformers opens it."),
        (
            "gpt2",  # two faults: neither choice alone mends both
            Structure(removed=frozenset({GPT2[0]}), embedding=EmbeddingChange(input=UNIT)),
            "Not a stock model: FFNs are removed, which no config.json can say, and the input embeddings are "
            "factorised.",
        ),
    ],
)
def test_lines(tmp_path, family, structure, line):
    with open_model(tiny_family(tmp_path / "in", family)) as source:
        support = stock_support(source, structure)
    assert support.line == line
    assert support.to_json() == {
        "is_stock": support.is_stock,
        "reason": support.reason,
        "nearest": support.nearest,
    }
    assert support.is_stock == line.startswith("A stock")
    if not support.is_stock:
        assert not support.config


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "phi3", "bart", "gpt2", "t5", "bert"])
def test_the_numbers_of_heads_are_those_that_transformers_takes(tmp_path, family):
    with open_model(tiny_family(tmp_path / "in", family)) as source:
        numbers = uniform_heads(source)
        if family not in ("llama", "mistral", "qwen2", "phi3"):
            assert numbers == ()
            return
        taken = []
        for kept in range(1, 5):
            counts = {"num_attention_heads": 2 * kept, "num_key_value_heads": kept, "head_dim": 4}
            try:
                CONFIG_MAPPING[family].from_dict({**source.config, **counts})
            except Exception:  # of whatever kind this version of transformers raises
                continue
            taken.append(kept)
    assert numbers == tuple(taken)


def test_factors_of_long_contexts_bind_the_heads_of_phi3(tmp_path):
    factors = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    keys = [{"rope_scaling": factors}, {"rope_parameters": factors}]
    for key in keys:
        with open_model(tiny_family(tmp_path / next(iter(key)), "phi3", **key)) as source:
            assert uniform_heads(source) == ()
