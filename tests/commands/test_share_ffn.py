import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prunecli.commands.prune import prune_ffn
from prunecli.commands.share import share_ffn
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from tests.commands import calls
from tests.commands.calls import call, refused
from tests.commands.sharing import owners
from tests.ffn_layouts import tiny

ENCODER, DECODER = "model.encoder.layers.{}", "model.decoder.layers.{}"
"""Of m2m_100: 3 and 2 layers, FFNs of 48 hidden units, d_model 32."""


run, done = partial(call, share_ffn), partial(calls.done, share_ffn)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {case: tiny(folder / case, case) for case in ("m2m_100", "gpt2", "bert", "llama", "nllb-moe")}


@pytest.fixture
def model(models):
    return models["m2m_100"]


def test_without_options_the_choices_are_said(model, tmp_path):
    result = done(model)
    assert "No --preset given: SharedEncNoDec." in result.err
    assert "No --init given: a shared FFN is the mean" in result.err
    assert "Written: shared-ffn (opens only where prunecli is installed: prunecli.load_model" in result.out
    first = ENCODER.format(0)
    assert owners("shared-ffn") == {
        **{ENCODER.format(n): first for n in range(3)},
        **{DECODER.format(n): None for n in range(2)},
    }
    with open_model("shared-ffn") as made, open_model(model) as source:
        assert shim_classes(made.config)
        assert made.structure.history[-1]["arguments"] == {"preset": "SharedEncNoDec", "seed": 0}
        assert made.structure.fingerprints() == (source.fingerprint,)


def test_json_of_a_dry_run(model, tmp_path):
    result = done(model, "--preset", "OneWide", "--dry-run", "--json")
    summary = json.loads(result.out)
    assert list(tmp_path.iterdir()) == []
    (group,) = summary["groups"]
    assert (group["owner"], group["width"], group["init"]) == (ENCODER.format(0), 5 * 48, "concat")
    assert group["parameters"] == 2 * 32 * 240 + 240 + 32
    assert len(group["sources"]) == 3
    assert summary["removed"] == [DECODER.format(0), DECODER.format(1)]
    # As many hidden units as before; the biases of four outputs and two norms are gone.
    assert summary["parameters_before"] - summary["parameters_after"] == 4 * 32 + 2 * 64
    assert summary["output"] is None


def test_the_history_names_no_stack_that_the_model_lacks(models):
    done(models["llama"], "--decoder", "share", "-o", "shared")
    with open_model(Path("shared")) as made:
        arguments = made.structure.history[-1]["arguments"]
    assert arguments["decoder"] == "share"
    assert "encoder" not in arguments


def test_the_demo_without_any_argument(tmp_path):
    result = done()
    assert "using the bundled demo model" in result.err
    assert "only its dense FFNs are changed (--dense-only)" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["shared-ffn"]


def test_a_reduced_checkpoint_is_reduced_further(model):
    done(model, "--preset", "SharedEnc", "-o", "one")
    assert "shared, as before" in done("one", "--preset", "NoDec", "-o", "two").out
    refused(run("two", "--preset", "SharedDec", "-o", "no"), "no FFN left to share", 2)


def test_activations_are_those_of_the_merged_ffn(models, tmp_path):
    """The FFN is merged, and then narrowed; activations are no means of its sources'."""
    (tmp_path / "text").write_text("ab cd\nefg\n")
    text = ("--width", 20, "--text", "text")
    done(models["gpt2"], *text, "--keep-units", "activations", "-o", "at-once")
    done(models["gpt2"], "-o", "merged")
    calls.done(prune_ffn, "merged", *text, "--metric", "activation", "-o", "narrowed")
    with open_model("at-once") as one, open_model("narrowed") as other:
        assert list(one.tensors) == list(other.tensors)
        assert all(one.read(name).tobytes() == other.read(name).tobytes() for name in one.tensors)


REFUSALS: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "gpt2",
        ("--preset", "NoEnc"),
        "of a model with decoder.\nIt can be: No, NoDec, OneWide, Shared, SharedDec.",
    ),
    ("bert", ("--decoder", "drop"), "--decoder drop: the model has no decoder"),
    ("m2m_100", ("--preset", "NoDec", "--encoder", "share"), "--preset does not go with"),
    ("m2m_100", ("--encoder", "share", "--groups", "2"), "different sizes.\nChoose one of 1, 3."),
    ("m2m_100", ("--encoder", "share", "--groups", "4"), "more groups than layers"),
    ("m2m_100", ("--preset", "SharedEncDec", "--groups", "1,1"), "share the same FFNs"),
    ("m2m_100", ("--preset", "NoDec", "--width", "8"), "--width is for shared FFNs"),
    ("m2m_100", ("--preset", "SharedEnc", "--keep-units", "norms"), "--keep-units: no FFN gets narrower"),
    ("m2m_100", ("--preset", "SharedEnc", "--data", "."), "--data: no text is read here"),
    ("gpt2", ("--width", "8"), "needs text.\nGive --text FILE"),
    (
        "m2m_100",
        ("--keep-units", "activations", "--width", "8", "--text", __file__),
        "--text goes with models that",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS)
def test_refusals(name, options, message, models, tmp_path):
    result = run(models[name], *options)
    refused(result, message, 2)
    assert list(tmp_path.iterdir()) == []
