from __future__ import annotations

import pytest

from prunecli.analysis.removed import Removed, removed
from prunecli.model.checkpoint import open_model
from tests.families import tiny_family
from tests.tiny import tiny_nllb_moe


def _step(command, **arguments):
    return {"command": command, "arguments": arguments}


def _heads(folder, name, heads, *history):
    """A Marian model (3 + 2 layers of 4 heads) whose config.json says that it kept these."""
    mark = {"version": 1, "heads": heads, "original_heads": dict.fromkeys(heads, 4), "history": list(history)}
    return open_model(tiny_family(folder / name, "marian", prunecli=mark))


def test_heads_of_one_attention_and_of_all(tmp_path):
    encoder = {
        f"model.encoder.layers.{layer}.self_attn": kept for layer, kept in enumerate([[0], [], [1, 3]])
    }
    cross = {"model.decoder.layers.1.encoder_attn": [2]}
    prune = "prune-heads"
    unit, found = removed(
        [
            open_model(tiny_family(tmp_path / "full", "marian")),
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
    lines = (
        "prune-heads, attention encoder",
        "prune-heads, attention all",
        "prune-heads, finetune, attention cross",
        "prune-heads, attention decoder, cross",
        "prune-heads, attention all",
    )
    fractions = (9 / 12, 12 / 28, 3 / 8, 3 / 16, 3 / 28)
    reduced = [Removed(pytest.approx(f), (line,)) for f, line in zip(fractions, lines, strict=True)]
    assert found == [Removed(0.0, tuple(dict.fromkeys(lines)), is_original=True), *reduced]


def test_experts(tmp_path):
    steps = {"a": {"granularity": "language", "metric": "importance"}, "b": {"metric": "random"}}
    pruned = [_experts(tmp_path, name, _step("prune-experts", **step)) for name, step in steps.items()]
    unit, found = removed([open_model(tiny_nllb_moe(tmp_path / "full")), *pruned])
    assert unit == "experts"
    assert found == [
        Removed(0.0, ("metric importance", "metric random"), is_original=True),
        Removed(0.75, ("metric importance",)),
        Removed(0.75, ("metric random",)),
    ]


LAYERS = [f"model.{side}.layers.{layer}.ffn" for side in ("encoder", "decoder") for layer in (1, 3)]


def _experts(folder, name, *history):
    """An NLLB-MoE whose config.json says that it kept 2 of 8 experts in each of 4 layers."""
    mark = {
        "version": 1,
        "experts": {layer: [0, 7] for layer in LAYERS},
        "original_experts": dict.fromkeys(LAYERS, 8),
        "history": list(history),
    }
    return open_model(tiny_nllb_moe(folder / name, experts=2, config={"prunecli": mark}))


def test_heads_and_experts_are_counted_as_parameters(tmp_path):
    full = open_model(tiny_nllb_moe(tmp_path / "full"))
    experts = _experts(tmp_path, "experts", _step("prune-experts"))
    heads = _heads(tmp_path, "heads", {"model.decoder.layers.1.encoder_attn": [2]}, _step("prune-heads"))
    unit, found = removed([full, experts, heads])
    assert unit == "parameters"
    assert [one.lines for one in found] == [
        ("prune-experts", "prune-heads"),
        ("prune-experts",),
        ("prune-heads",),
    ]


def test_an_original_starts_the_lines_of_what_was_made_from_it(tmp_path):
    full, other = (open_model(tiny_nllb_moe(tmp_path / name, seed=n)) for n, name in enumerate("ab"))

    def made(name, source, balance, *more):
        first = _step("prune-experts", balance=balance)
        first["source"] = {"path": source.path.name, "fingerprint": source.fingerprint}
        return _experts(tmp_path, name, first, *more)

    pruned = [made(f"p{n}", full, balance) for n, balance in enumerate(("1:1", "3:1", "1:1"))]
    tuned = made("tuned", full, "1:1", _step("finetune"))
    stranger = made("q", other, "1:1")
    _, found = removed([full, other, *pruned, tuned, stranger])
    assert [one.is_original for one in found] == [True, True, False, False, False, False, False]
    assert found[2].lines == found[4].lines
    assert set(found[0].lines) == {line for one in found[2:6] for line in one.lines}
    assert found[1].lines == found[6].lines
    assert len({one.lines for one in found[2:]}) == 4


def test_the_order_of_ablation_is_known_from_the_history(tmp_path):
    cross = {"model.decoder.layers.1.encoder_attn": [2]}
    models = [
        _heads(tmp_path, method, cross, _step("prune-heads", ratio=0.1, method=method))
        for method in ("gradient", "ablation")
    ]
    assert [one.by_ablation for one in removed(models)[1]] == [False, True]
