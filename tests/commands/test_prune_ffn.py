"""`prunecli prune-ffn` from the command line to the written directory, and every refusal."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from prunecli.commands.prune_ffn import prune_ffn
from prunecli.methods.ffn.names import UnitMetric
from prunecli.model.checkpoint import open_model
from tests.commands import calls
from tests.commands.calls import call, refused
from tests.families import tiny_family

run, done = partial(call, prune_ffn), partial(calls.done, prune_ffn)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FFNs of 48 hidden units, 40 in the decoder of m2m_100."""
    folder = tmp_path_factory.mktemp("models")
    return {case: tiny_family(folder / case, case) for case in ("m2m_100", "llama", "nllb-moe")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """A working directory with texts."""
    for name in ("text.txt", "val.eng_Latn", "val.fra_Latn"):
        Path(name).write_text("the hen\nten tins on\nthen no hen\n")
    return tmp_path


def test_without_options_the_defaults_are_said(models: dict[str, Path]) -> None:
    result = done(models["m2m_100"], "--data", ".", "--pairs", "eng_Latn-fra_Latn")
    assert "No --ratio given: removing 25% of the hidden units." in result.err
    assert "Hidden units of each FFN by activation-norm" in result.err
    assert "Written: pruned-ffn (stock layout)" in result.out
    with open_model("pruned-ffn") as opened:
        opened.check()
        assert (opened.config["encoder_ffn_dim"], opened.config["decoder_ffn_dim"]) == (36, 30)
        arguments = opened.structure.history[-1]["arguments"]
    assert (arguments["ratio"], arguments["score"]) == (0.25, "activation-norm")


def test_weights_alone_are_warned_of(models: dict[str, Path]) -> None:
    result = done(models["m2m_100"], "--width", 16, "--metric", "norms")
    assert "Warning: norms looks at no text." in result.err
    assert "Loss on" not in result.out
    with open_model("pruned-ffn") as opened:
        assert {layer.width for layer in opened.layout.ffns} == {16}


@pytest.mark.parametrize("score", get_args(UnitMetric))
@pytest.mark.parametrize("per_layer", [False, True])
def test_json_of_a_dry_run(score: str, per_layer: bool, models: dict[str, Path]) -> None:
    if per_layer and score == "random":
        return
    text = ("--text", "text.txt") if score.startswith("activation") else ()
    more = (*text, *(("--uneven",) if per_layer else ()))
    shown = json.loads(
        done(models["llama"], "--metric", score, "--ratio", "50%", *more, "--dry-run", "--json").out
    )
    assert [*shown["held"].values()] == [48] * 3
    assert sum(map(len, shown["kept"].values())) == 72
    assert shown["stock"]["is_stock"] != per_layer
    assert ("text" in shown["arguments"]) == bool(text)
    assert not Path("pruned-ffn").exists()


def test_widths_are_rounded(models: dict[str, Path]) -> None:
    done(models["llama"], "--ratio", 0.3, "--multiple-of", 8, "--metric", "random", "--seed", 3)
    with open_model("pruned-ffn") as opened:
        assert opened.config["intermediate_size"] == 32


def test_what_keeps_all_units_says_so(models: dict[str, Path]) -> None:
    shown = done(models["llama"], "--ratio", 0, "--metric", "random", "--dry-run").out
    assert shown.split("all model.layers.*.mlp")[1].split()[:3] == ["144", "144", "0.0%"]


def test_dense_ffns_between_experts(models: dict[str, Path]) -> None:
    refused(run(models["nllb-moe"], "--metric", "norms"), "4 of the 8 FFNs are mixtures of experts", 1)
    done(models["nllb-moe"], "--metric", "norms", "--dense-only", "--side", "encoder")
    with open_model("pruned-ffn") as opened:
        assert {layer.width for layer in opened.layout.ffns if layer.side == "encoder"} == {24, 32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", 64, "--metric", "norms"), "an FFN has 48 hidden units"),
        ((), "--metric activation-norm needs text"),
        (("--metric", "norms", "--text", "text.txt"), "--metric norms looks at no text"),
        (("--data", "."), "--data goes with models that translate"),
    ],
)
def test_refusals(models: dict[str, Path], arguments: tuple, message: str) -> None:
    refused(run(models["llama"], *arguments), message, 2)
    assert not Path("pruned-ffn").exists()
