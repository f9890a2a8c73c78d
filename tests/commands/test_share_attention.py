import json
from functools import partial
from pathlib import Path

import pytest

from prunecli.commands.share import share_attention
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from tests.commands import calls, sharing
from tests.commands.calls import call
from tests.selections import kept_heads

ENCODER, DECODER, CROSS = (
    "model.encoder.layers.{}.self_attn",
    "model.decoder.layers.{}.self_attn",
    "model.decoder.layers.{}.encoder_attn",
)
"""Of m2m_100: 3 and 2 layers, d_model 32."""

run, done = partial(call, share_attention), partial(calls.done, share_attention)
owners = partial(sharing.owners, part="attentions")


@pytest.fixture
def model(models):
    return models["m2m_100"]


def test_without_options_the_choices_are_said(model):
    result = done(model)
    assert "No --preset given: SharedEncSharedDec." in result.err
    assert "No --init given: a shared attention is the mean" in result.err
    assert "Not a stock model: attentions are shared" in result.out
    assert owners("shared-attention") == {
        **{ENCODER.format(n): ENCODER.format(0) for n in range(3)},
        **{DECODER.format(n): DECODER.format(0) for n in range(2)},
        **{CROSS.format(n): CROSS.format(n) for n in range(2)},
    }
    with open_model("shared-attention") as made:
        assert shim_classes(made.config)
        assert made.structure.history[-1]["arguments"] == {"preset": "SharedEncSharedDec"}


def test_json_of_a_dry_run(model, tmp_path):
    """(N - 1) x 4 x d_model^2 by sharing, N x 4 x d_model^2 by dropping, biases, and the norms of what is dropped."""
    result = done(model, "--encoder", "share", "--decoder", "drop", "--init", "last", "--dry-run", "--json")
    summary = json.loads(result.out)
    assert list(tmp_path.iterdir()) == []
    assert summary["groups"][0] == {
        "owner": ENCODER.format(0),
        "members": [ENCODER.format(n) for n in range(3)],
        "sources": [ENCODER.format(2)],
        "init": "last",
        "heads": [0, 1, 2, 3],
        "parameters": 4 * 32 * 32 + 4 * 32,
    }
    assert summary["removed"] == [DECODER.format(0), DECODER.format(1)]
    saved = summary["parameters_before"] - summary["parameters_after"]
    assert saved == 4 * (4 * 32 * 32 + 4 * 32) + 2 * 2 * 32
    assert summary["output"] is None


def test_layers_share_with_those_of_their_window(models):
    result = done(models["gemma2"], "-o", "out")
    assert "layers of their own window alone (full_attention, sliding_attention)." in result.err
    names = [f"model.layers.{n}.self_attn" for n in range(3)]
    assert list(owners("out").values()) == [names[0], names[1], names[0]]


def test_the_table_says_what_is_made(model):
    out = done(model, "--preset", "SharedEncNoDec", "--dry-run").out
    for text in (
        "encoder 0-2",
        "mean of 3",
        "cross 0-1",
        "as before, one each",
        "decoder 0-1",
        "none",
        "Dry run",
    ):
        assert text in out


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.status != 0
    return result.err


def test_refusals(model, models):
    assert "--preset does not go with" in refused(model, "--preset", "NoDec", "--encoder", "share")
    assert "--cross share: the model has no cross-attention" in refused(models["gpt2"], "--cross", "share")
    assert "--encoder drop: the model has no encoder self-attention" in refused(
        models["gpt2"], "--encoder", "drop"
    )
    assert "--groups 2: 3 layers of encoder self-attention to share" in refused(
        model, "--encoder", "share", "--groups", 2
    )
    assert "--groups x: must be a valid integer" in refused(model, "--encoder", "share", "--groups", "x")
    assert "--init is for shared attentions" in refused(model, "--encoder", "drop", "--init", "last")
    assert "no such configuration" in refused(model, "--preset", "OneWide")
    done(model, "--encoder", "drop", "-o", "none")
    assert "no encoder self-attention left to share" in refused("none", "--encoder", "share")
    done(model, "--encoder", "share", "-o", "one")
    assert "share one attention already and would be parted" in refused(
        "one", "--encoder", "share", "--groups", 3
    )


def pruned(source: Path, output: str, kept: dict[str, tuple[int, ...]]) -> str:
    with open_model(source) as opened:
        apply(opened, cut(opened, kept_heads(kept)), Path(output))
    return output


def test_numbers_of_heads_must_be_equal(model, models):
    uneven = pruned(model, "uneven", {ENCODER.format(0): (0, 1), ENCODER.format(1): (2,)})
    assert "different numbers of heads (1, 2, 4)" in refused(uneven, "--encoder", "share")
    name = "encoder.block.{}.layer.0.SelfAttention"
    others = pruned(models["t5"], "others", {name.format(n): (n, 3) for n in range(3)})
    assert "positions of its own" in refused(others, "--encoder", "share")
    done(others, "--encoder", "share", "--init", "last", "-o", "last")
    with open_model("last") as opened:
        assert {layer.heads for layer in opened.layout.attentions if layer.kind == "encoder"} == {(2, 3)}
