"""Small trainings for the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from prunecli.model.checkpoint import open_model
from prunecli.model.rewrite import rewritten
from prunecli.pipeline import apply
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText
from prunecli.training.data import TrainingData
from prunecli.training.options import LossOptions, TrainingOptions
from prunecli.training.result import outputs_of
from prunecli.training.state import WEIGHTS
from prunecli.training.train import train as train_

PAIRS = (("eng_Latn", "fra_Latn"), ("fra_Latn", "eng_Latn"))
WORDS = ("the", "hen", "ten", "no", "tin", "then", "on", "he")


def lines(count, seed=0):
    """Sentences of one to six words; the same seed gives the same."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(1, 7, (1,), generator=generator))
        words = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        made.append([WORDS[word] for word in words])
    return made


def text_file(path, count=40):
    """The sentences of `lines` in a file; returns its path."""
    path.write_text("".join(f"{' '.join(words)}\n" for words in lines(count)))
    return path


def parallel(count=40, seed=0):
    """English, and its words from the last to the first as French."""
    words = lines(count, seed)
    english = tuple(" ".join(line) for line in words)
    french = tuple(" ".join(reversed(line)) for line in words)
    return ParallelText(f"train-{seed}", {"eng_Latn": english, "fra_Latn": french})


def translation(count=40, valid=8):
    return TrainingData("translation", parallel(count), parallel(valid, 1) if valid else None, PAIRS)


def language_model(count=40, valid=8):
    def text(number, seed):
        return PlainText((Path("text"),), tuple(" ".join(line) for line in lines(number, seed)))

    return TrainingData("lm", text(count, 0), text(valid, 1) if valid else None)


OPTIONS = TrainingOptions(
    loss=LossOptions(label_smoothing=0.1),
    steps=6,
    batch_tokens=100,
    learning_rate=1e-3,
    warmup=2,
    device="cpu",
    eval_every=2,
)


def options(**changes):
    return OPTIONS.model_copy(update=changes)


def train(checkpoint, state, made=OPTIONS, data=None, **more):
    """A whole run of the library's function; returns what it returns."""
    return train_(
        lambda: open_model(checkpoint),
        translation() if data is None else data,
        made,
        state,
        origin={"source": str(checkpoint)},
        **more,
    )


def staged(trained):
    """The trained tensors' bytes."""
    return (trained.staged / "model.safetensors").read_bytes()


def written(source, trained, output):
    """The result as the command writes it; returns its path."""
    with open_model(source) as before, open_model(trained.staged) as weights:
        outputs = outputs_of(before, weights, None)
        apply(weights, rewritten(weights, before.structure, outputs, {"command": "finetune"}), output)
    return output


def unchanged(one, other):
    """Names of the tensors that two checkpoints have alike."""
    with open_model(one) as first, open_model(other) as second:
        assert set(first.tensors) == set(second.tensors)
        return {name for name in first.tensors if np.array_equal(first.read(name), second.read(name))}


def changed(source, trained):
    """Names of the tensors that the training changed."""
    with open_model(source) as before:
        return set(before.tensors) - unchanged(source, trained.staged)


def kept_steps(state):
    """Updates after which the state was kept."""
    return sorted(int(path.parent.name.rpartition("-")[2]) for path in state.glob(f"checkpoint-*/{WEIGHTS}"))
