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
UNIFORM, CACHE = "`prune-heads --uniform`", "`factorize-embeddings --cache`"
FACTORISED = "the input embeddings are factorised"
LLAMA = [f"model.layers.{number}.self_attn" for number in range(3)]
GPT2 = [f"transformer.h.{number}.mlp" for number in range(3)]


def heads(names: list[str], *kept: tuple[int, ...]) -> Structure:
    return Structure(axes_of("head", dict(zip(names, kept, strict=True)), 4))


def embedding(**sides: Any) -> Structure:
    return Structure(embedding=EmbeddingChange(**sides))


@pytest.mark.parametrize(
    ("family", "structure", "reason", "nearest"),
    [
        ("llama", Structure(), None, None),
        ("llama", heads(LLAMA, (0,), (0, 1, 2), (0, 1)), "heads differ between layers (1 to 3)", UNIFORM),
        (
            "llama",
            heads(LLAMA, (0, 1, 2), (0, 1, 2), (1, 2, 3)),
            "transformers refuses 6 heads of a layer where hidden_size is 32, no multiple of it",
            UNIFORM,
        ),
        ("llama", heads(LLAMA, (), (), ()), "no heads are left", UNIFORM),
        (
            "bart",
            heads(["model.encoder.layers.0.self_attn"], (0, 1)),
            "heads were removed, and a config of type bart cannot say how many",
            None,
        ),
        (
            "t5",  # all heads, but not in the order of the shared table of positions
            heads(["encoder.block.0.layer.0.SelfAttention"], (1, 0, 2, 3)),
            "heads were removed, and a config of type t5 cannot say how many",
            None,
        ),
        (
            "gpt2",
            Structure(removed=frozenset({GPT2[1]})),
            "FFNs are removed, which no config.json can say",
            None,
        ),
        ("gpt2", Structure(shared={GPT2[1]: GPT2[0]}), "FFNs are shared, which no config.json can say", None),
        ("gpt2", Structure(widths={GPT2[1]: 20}), "the widths of FFNs differ (20 to 128)", None),
        ("gpt2", embedding(input=UNIT), FACTORISED, CACHE),
        ("gpt2", embedding(input=UNIT, output=OutputChange()), FACTORISED, CACHE),
        ("gpt2", embedding(input=UNIT, output=OutputChange(8)), "the output embeddings are factorised", None),
        ("bart", embedding(output=OutputChange()), None, None),
        ("gpt2", embedding(output=OutputChange()), None, None),
        (
            "gpt2",  # two faults: neither choice alone mends both
            Structure(removed=frozenset({GPT2[0]}), embedding=EmbeddingChange(input=UNIT)),
            f"FFNs are removed, which no config.json can say, and {FACTORISED}",
            None,
        ),
    ],
)
def test_reasons(models, family, structure, reason, nearest):
    support = stock_support(open_model(models[family]), structure)
    assert support.to_json() == {"is_stock": reason is None, "reason": reason, "nearest": nearest}
    assert not reason or support.is_fitted or not support.config
    end = f"; {nearest} would give one." if nearest else "."
    whole = "A stock model: plain transformers opens it."
    assert support.line == (f"Not a stock model: {reason}{end}" if reason else whole)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "phi3", "bart", "gpt2", "t5", "bert"])
def test_the_numbers_of_heads_are_those_that_transformers_takes(models, family):
    source = open_model(models[family])
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
        assert uniform_heads(open_model(tiny_family(tmp_path / next(iter(key)), "phi3", **key))) == ()
