"""Small trainings for the tests."""

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from prunecli.model.checkpoint import open_model
from prunecli.model.rewrite import rewritten
from prunecli.pipeline import apply
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText
from prunecli.training.data import TrainingData
from prunecli.training.finetune import train as train_
from prunecli.training.options import LossOptions, TrainingOptions
from prunecli.training.parts import trained_outputs
from prunecli.training.state import WEIGHTS, Start
from prunecli.training.trainer import Watch
from tests.families import tiny_family
from tests.tiny import write_files

CALM = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
"""No chance in training: the tiny models have no dropout, but M2M-100's default leaves out layers now and then."""

PAIRS = (("eng_Latn", "fra_Latn"), ("fra_Latn", "eng_Latn"))
WORDS = ("the", "hen", "ten", "no", "tin", "then", "on", "he")


def lines(count, seed=0):
    """Sentences of one to six words; the same seed gives the same."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(1, 7, (1,), generator=generator))
        words = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        made.append(" ".join(WORDS[word] for word in words))
    return made


def text_file(path, count=40):
    """The sentences of `lines` in a file; returns its path."""
    Path(path).write_text("\n".join(lines(count)) + "\n")
    return path


def parallel(count=40, seed=0):
    """English, and its words from the last to the first as French."""
    english = tuple(lines(count, seed))
    french = tuple(" ".join(reversed(line.split())) for line in english)
    return ParallelText(f"train-{seed}", {"eng_Latn": english, "fra_Latn": french})


def write_parallel(folder, **counts: int) -> None:
    """Write so many lines of each split."""
    for seed, (split, count) in enumerate(counts.items()):
        texts = parallel(count, seed).sentences.items()
        write_files(
            folder, {f"{split}.{name}": "".join(f"{line}\n" for line in text) for name, text in texts}
        )


def translation(count=40, valid=8):
    return TrainingData("translation", parallel(count), parallel(valid, 1) if valid else None, PAIRS)


def language_model(count=40, valid=8):
    def text(number, seed):
        return PlainText((Path("text"),), tuple(lines(number, seed)))

    return TrainingData("lm", text(count, 0), text(valid, 1) if valid else None)


def calm_case(folder, family, **changes):
    """A tiny M2M-100 or GPT-2 that leaves nothing to chance, and data to train it on."""
    if family == "gpt2":
        return tiny_family(folder, family, **changes), language_model()
    return tiny_family(folder, family, **CALM, **changes), translation()


OPTIONS = TrainingOptions(
    loss=LossOptions(label_smoothing=0.1),
    steps=6,
    batch_tokens=100,
    learning_rate=1e-3,
    warmup=2,
    device="cpu",
    dtype="float32",
    eval_every=2,
)


def options(**changes):
    return OPTIONS.updated(**changes)


def train(checkpoint, state, made=OPTIONS, data=None, **more):
    """A whole run of the library's function: the model, figures (`log`), and its weights in float32 (`staged`)."""
    start, state = Start(checkpoint), Path(state)
    model, log = train_(start, translation() if data is None else data, made, state, **more)
    trained = SimpleNamespace(model=model, log=log)
    trained.staged = written(checkpoint, trained, state / "result", "float32")
    return trained


@contextmanager
def signalled(monkeypatch, number):
    """Within the block, the signal comes at the third update of each run."""
    count = Watch.on_step_end

    def stop(self, args, state, control, **more):
        if state.global_step == 3:
            os.kill(os.getpid(), number)
        count(self, args, state, control, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Watch, "on_step_end", stop)
        yield


def staged(trained):
    return (trained.staged / "model.safetensors").read_bytes()


def written(source, trained, output, dtype=None):
    """The result as the command writes it; returns its path."""
    before = open_model(source)
    outputs, step = trained_outputs(trained.model, before), {"command": "finetune"}
    apply(before, rewritten(before, before.structure, outputs, step, dtype=dtype), output, force=True)
    return output


def unchanged(one, other):
    """Names of the tensors that two checkpoints have alike."""
    first = open_model(one)
    second = open_model(other)
    assert set(first.tensors) == set(second.tensors)
    return {name for name in first.tensors if np.array_equal(first.read(name), second.read(name))}


def changed(source, trained):
    """Names of the tensors that the training changed."""
    return set(open_model(source).tensors) - unchanged(source, trained.staged)


def update_ranks(source, trained):
    """Name of each tensor that the training changed -> the highest rank of its update."""
    before = open_model(source)
    after = open_model(trained.staged)
    names = changed(source, trained)
    updates = {name: after.read(name).astype(np.float64) - before.read(name) for name in names}
    return {name: np.max(np.linalg.matrix_rank(update, tol=1e-5)) for name, update in updates.items()}


def kept_steps(state):
    """Updates after which the state was kept."""
    return sorted(
        int(path.parent.name.rpartition("-")[2]) for path in Path(state).glob(f"checkpoint-*/{WEIGHTS}")
    )
