"""Two processes that know of each other do what one does with twice the batches of an update."""

from __future__ import annotations

import numpy as np
import pytest

from prunecli.errors import UsageError
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from tests.families import tiny_family
from tests.forked import ended, start
from tests.selections import kept_heads
from tests.training.runs import options, parallel, train, translation

CALM = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
SMALL = ("--batch-tokens", "100", "--steps", "4", "--eval-every", "2", "--warmup", "1", "--device", "cpu")


@pytest.fixture
def folder(tmp_path):
    tiny_family(tmp_path / "model", "m2m_100", **CALM)
    (tmp_path / "data").mkdir()
    for split, count, seed in (("train", 40, 0), ("val", 3, 1)):
        for language, sentences in parallel(count, seed).sentences.items():
            (tmp_path / "data" / f"{split}.{language}").write_text("\n".join(sentences) + "\n")
    return tmp_path


def _start(folder, *arguments):
    return ended(start(folder, "finetune", "model", "--data", "data", *arguments))


def test_two_processes_make_the_model_of_one(folder):
    first, second = _start(folder, *SMALL, "--measure", "chrf++", "--learning-rate", "1e-3", "-o", "out")
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert first[1].count("Written: out") == 1
    assert first[2].count("step 2:") == 1
    assert "Written" not in second[1]  # the first process alone speaks
    assert "step 2:" not in second[2]
    assert not (folder / "out.training").exists()
    made = options(steps=4, warmup=1, accumulate=2, metric="chrf++")
    trained = train(folder / "model", folder / "one", made, translation(40, 3))
    before, one, two = (open_model(path) for path in (folder / "model", trained.staged, folder / "out"))
    moved = np.mean([np.abs(one.read(name) - before.read(name)).mean() for name in one.tensors])
    apart = np.mean([np.abs(one.read(name) - two.read(name)).mean() for name in one.tensors])
    assert apart < 0.02 * moved


def test_two_processes_keep_results_in_their_course(folder):
    """Activations are computed again, and some parameters have no gradient: those of an attention without heads."""
    with open_model(folder / "model") as source:
        kept = {source.layout.attentions[0].name: ()}
        apply(source, cut(source, kept_heads(kept)), folder / "reduced")
    more = ("--gradient-checkpointing", "--save-every", "2", "-o", "out")
    first, second = ended(start(folder, "finetune", "reduced", "--data", "data", *SMALL, *more))
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert sorted(path.name for path in (folder / "out.steps").iterdir()) == ["step-2", "step-4"]
    with open_model(folder / "out.steps" / "step-2") as kept_early, open_model(folder / "out") as last:
        assert kept_early.structure.axes == last.structure.axes
        assert kept_early.fingerprint != last.fingerprint


def test_sharded_training_is_refused(folder, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match="set to FSDP"):
        train(folder / "model", folder / "state", options())


def test_a_failure_of_all_is_said_and_leaves_nothing(folder):
    for status, _, err in _start(folder, *SMALL, "--pairs", "eng_Latn-xxx_Latn", "-o", "out"):
        assert status == 1
        assert "Error: unknown language 'xxx_Latn'" in err
    assert sorted(path.name for path in folder.iterdir()) == ["data", "model"]
