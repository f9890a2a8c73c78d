from __future__ import annotations

import pytest

from prunecli.analysis.removed import Removed, removed
from prunecli.checkpoint.reader import open_checkpoint
from tests.families import tiny_family
from tests.tiny import tiny_nllb_moe


def _step(command, **arguments):
    return {"command": command, "arguments": arguments}


def _heads(folder, name, heads, *history):
    """A Marian model (3 + 2 layers of 4 heads) whose config.json says that it kept these."""
    mark = {"version": 1, "heads": heads, "original_heads": dict.fromkeys(heads, 4), "history": list(history)}
    return open_checkpoint(tiny_family(folder / name, "marian", prunecli=mark))


def test_heads_of_one_attention_and_of_all(tmp_path):
    encoder = {
        f"model.encoder.layers.{layer}.self_attn": kept for layer, kept in enumerate([[0], [], [1, 3]])
    }
    cross = {"model.decoder.layers.1.encoder_attn": [2]}
    prune = "prune-heads"
    unit, found = removed(
        [
            open_checkpoint(tiny_family(tmp_path / "full", "marian")),
            _heads(tmp_path, "encoder", encoder, _step(prune, ratio=0.75, attention=["encoder"])),
            _heads(tmp_path, "all", {**encoder, **cross}, _step(prune, ratio=0.4)),
            _heads(
                tmp_path, "one", cross, _step(prune, attention="cross"), _step("finetune", attention=["x"])
            ),
            _heads(tmp_path, "two", cross, _step(prune, attention=["decoder", "cross"])),
            _heads(tmp_path, "every", cross, _step(prune, attention=["encoder", "decoder", "cross"])),
        ]
    )
    assert unit == "heads"
    assert found == [
        Removed(0.0, None),
        Removed(pytest.approx(9 / 12), "encoder"),
        Removed(pytest.approx(12 / 28), "all"),
        Removed(pytest.approx(3 / 8), "cross"),
        Removed(pytest.approx(3 / 16), "decoder, cross"),
        Removed(pytest.approx(3 / 28), "all"),
    ]


def test_heads_of_a_model_of_one_stack(tmp_path):
    mark = {
        "version": 1,
        "heads": {"transformer.h.0.attn": [1]},
        "original_heads": {"transformer.h.0.attn": 4},
    }
    checkpoint = open_checkpoint(tiny_family(tmp_path / "gpt2", "gpt2", prunecli=mark))
    assert removed([checkpoint]) == ("heads", [Removed(pytest.approx(3 / 12), "all")])


def test_experts(tmp_path):
    def pruned(name, **arguments):
        layers = [f"model.{side}.layers.{layer}.ffn" for side in ("encoder", "decoder") for layer in (1, 3)]
        mark = {
            "version": 1,
            "experts": {layer: [0, 7] for layer in layers},
            "original_experts": dict.fromkeys(layers, 8),
            "history": [_step("prune-experts", **arguments)],
        }
        return open_checkpoint(tiny_nllb_moe(tmp_path / name, experts=2, config={"prunecli": mark}))

    unit, found = removed(
        [
            open_checkpoint(tiny_nllb_moe(tmp_path / "full")),
            pruned("a", granularity="language", metric="importance"),
            pruned("b", metric="random"),
        ]
    )
    assert unit == "experts"
    assert found == [Removed(0.0, None), Removed(0.75, "language"), Removed(0.75, "random")]


def test_parameters_where_nothing_was_pruned(tmp_path):
    paths = [tiny_nllb_moe(tmp_path / str(layers), layers=layers) for layers in (4, 2)]
    full, small = (open_checkpoint(path) for path in paths)
    counts = [sum(info.numel for info in checkpoint.tensors.values()) for checkpoint in (full, small)]
    unit, found = removed([full, small, full])
    assert unit == "parameters"
    assert found == [
        Removed(0.0, None),
        Removed(pytest.approx(1 - counts[1] / counts[0]), "all"),
        Removed(0.0, None),
    ]
