from pathlib import Path
from unittest.mock import Mock

import pytest

from prunecli import results
from prunecli.analysis.explanation import explain
from prunecli.commands.prune import shrink
from prunecli.errors import CheckpointError
from prunecli.evaluation.options import LatencyOptions
from prunecli.model.checkpoint import open_model
from prunecli.report.history import step_text
from prunecli.results.rewriting import Shrunk
from prunecli.shrinking import levers
from prunecli.shrinking import shrink as module
from tests.commands.calls import both, names, refusals, refused
from tests.failing import failing_after
from tests.families import tiny_family

run, timed = both(shrink, "--score-tokens 64 --trial-tokens 64 --trials 1")


def done(*given):
    """The command, which takes half of its time for the speeds of tiny models, with two tokens and one run for them."""
    with pytest.MonkeyPatch.context() as patch:
        few = {"new_tokens": 2, "runs": 1}
        patch.setattr(module, "LatencyOptions", lambda **options: LatencyOptions(**options | few))
        return timed(*given)


def shrunk() -> Shrunk:
    return results.read("shrunk.shrink.json")


@pytest.fixture
def model(models):
    return models["llama-tied"]


@pytest.fixture(autouse=True)
def text():
    Path("text.txt").write_text("the hen\nten tins on it\nthen no hen\na tin, then ten\nno tins\n" * 8)


def test_a_model_is_shrunk_by_all_kinds(model):
    result = timed(model, "--text text.txt --params 70%")
    result.shows("On text that nothing was chosen by", "A stock model", "--heal 10m")
    document = shrunk()
    assert document.parameters_after <= 0.7 * document.parameters_before
    assert [one.model for one in document.stages] == ["original", "cut"]
    curves = {kind for one in document.tried if one.stage == "curve" for kind in one.shares}
    assert {"layers", "units", "heads"} <= curves
    assert {*document.tables()} == {"tried", "stages"}
    opened = open_model("shrunk")
    opened.check()
    assert opened.total_parameters == document.parameters_after
    steps = [step["command"] for step in opened.structure.history]
    assert len(steps) == len(document.shares)
    # Each kind has its own decision, which `explain` reads.
    assert ("falls into more tokens" in result.out) == ("tokens" in document.shares)
    kind = next(iter(document.shares))
    question = {"units": "unit 0 of layer 0", "layers": "layer 0", "heads": "head 0 of layer 0"}
    assert explain(Path("shrunk"), question.get(kind, "token hen"))


def test_a_speed_that_cannot_be_measured_fails_no_other_target(model, monkeypatch):
    failing = Mock(side_effect=CheckpointError("generation_config.json: eos_token_id is 99"))
    monkeypatch.setattr(module, "bench_latency", failing)
    given = f"{model} --text text.txt --only units"
    result = timed(given, "--params 90%")
    assert "The speed is not measured: generation_config.json" in result.err
    assert "Written: shrunk" in result.out
    refused(run(given, "--speed 1.1 -o faster"), "eos_token_id is 99", 1)


def test_a_classifier_of_single_texts_is_shrunk():
    model = tiny_family("bert", "bert-classifier")
    rows = (f"{row % 2}\t{'the hen' if row % 2 else 'ten tins on it'}" for row in range(60))
    Path("labelled.tsv").write_text("\n".join(rows))
    done(model, "--labelled labelled.tsv --params 90%")


def test_channels_are_removed_if_they_are_named(model):
    done(model, "--text text.txt --only channels,units --params 60%")
    document = shrunk()
    assert {"channels": "norm-output"} in [one.metrics for one in document.tried]
    done(model, "--text text.txt --only channels --params 70% -o narrow")
    opened = open_model("narrow")
    assert opened.config["hidden_size"] < open_model(model).config["hidden_size"]
    (step,) = opened.structure.history
    assert "--only channels" in step_text(step)
    (answer,) = explain(Path("narrow"), "channel 3")
    assert "norm-output" in answer.text


def test_an_interrupted_search_is_resumed(model, monkeypatch):
    given = f"{model} --text text.txt --only units,layers"
    with monkeypatch.context() as patch:
        patch.setattr(module, "apply", failing_after(3, module.apply, KeyboardInterrupt()))
        assert run(given).status != 0
    monkeypatch.setattr(levers, "measure_gradients", None)  # the scores are there
    assert "Resuming an unfinished run" in done(given).err
    assert not list(Path().glob("*unfinished*"))


def test_layer_by_layer_trials_lose_what_they_lose_in_memory(model):
    given = f"{model} --text text.txt --params 80% --replace none"
    losses = []
    for more in ("", "--memory 8GiB"):
        done(given, more, "--force")
        document = shrunk()
        losses.append({str((one.shares, one.metrics)): one.quality.loss for one in document.tried})
    whole, by_layer = losses
    assert "cosine" in str([*whole])
    assert "cosine" not in str([*by_layer])
    both = {*whole} & {*by_layer}
    assert len(both) > 3
    assert {key: by_layer[key] for key in both} == pytest.approx({key: whole[key] for key in both}, rel=1e-5)


def test_a_healed_model_learns_from_the_original(model):
    result = done(model, "--text text.txt --only units --heal-steps 2")
    assert "less than one update could take" in result.err, "a short text does not end it after the search"
    assert result.err.count("Text: 1 file as a whole document") == 1, "a note is printed once"
    document = shrunk()
    assert [one.model for one in document.stages] == ["original", "cut", "healed"]
    assert "Written: shrunk" in result.out
    assert open_model("shrunk").structure.history[-1]["command"] == "finetune"
    assert not Path("shrunk.cut").exists()


def test_a_dry_run_writes_nothing(model):
    result = done(model, "--text text.txt --only layers --dry-run --json")
    assert result.json["shares"] == {"layers": pytest.approx(0.3333)}
    assert names(Path()) == ["text.txt"]


def test_a_mixture_is_tried_however_short_the_time(model):
    done(model, "--text text.txt --params 70% --minutes 0.0001")
    document = shrunk()
    assert "whole" in [one.stage for one in document.tried]
    # One point of each of three curves, one mixture.
    assert len({str(one.shares) for one in document.tried}) <= 4


def test_bytes_are_a_target(model):
    size = int(0.8 * open_model(model).total_bytes)
    done(model, f"--text text.txt --only units --size {size}")
    assert open_model("shrunk").total_bytes <= size


@refusals(
    ("--params 1", "must be less than 1"),
    ("--heal soon", "not a duration"),
    ("--memory 8GiB --only channels", "With --memory, channels are not scored"),
    ("--only experts", "has no experts", 1),
    ("--only heads --params 0.01", "smallest mixture"),
)
def test_refusals(refusal, model):
    refusal(run, model, "--text text.txt")


def test_text_is_needed(model):
    refused(run(model), "task lm needs text")
