"""A teacher's likeliest tokens at every scored position of the training text, computed once and kept in a file.

At each position the k largest log probabilities are kept, as float16. The others share evenly what is left of the
teacher's probability, so that KL_t of `prunecli.training.loss` needs no teacher in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prunecli.errors import DataError, UsageError
from prunecli.modules.logits import Logits
from prunecli.progress import Progress, silent
from prunecli.running.examples import IGNORED, Examples
from prunecli.tensors.transaction import refuse_output
from prunecli.text.tasks import HEADLESS, TrainingTask

KEPT = 64
"""Tokens of a position that are kept: k."""

LOG_PROBABILITIES, TOKENS = "teacher_log_probabilities", "teacher_tokens"
"""Inputs of a batch: `[positions, k]` float16 and int32, of its scored positions in their order."""


@dataclass(frozen=True)
class TeacherLogits:
    """Content of a file of logits.

    Attributes:
        log_probabilities: `[positions, k]` float16, the largest first.
        tokens: `[positions, k]` int32.
        ends: `[examples + 1]` int64: where the positions of each example begin, and the end of the last.
    """

    log_probabilities: Tensor
    tokens: Tensor
    ends: Tensor

    def of(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """The inputs for a batch of these examples."""
        spans = [slice(int(self.ends[row]), int(self.ends[row + 1])) for row in rows]
        whole = {LOG_PROBABILITIES: self.log_probabilities, TOKENS: self.tokens}
        return {name: torch.cat([tensor[span] for span in spans]) for name, tensor in whole.items()}


def whole_logits(log_probabilities: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Logits `[positions, vocabulary]` float32 of a distribution of which only the k likeliest tokens are known.

    Args:
        log_probabilities: `[positions, k]`.
        tokens: `[positions, k]`.
        vocabulary: at least k.
    """
    known = log_probabilities.float()
    rest = (1 - known.exp().sum(1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps)
    others = max(vocabulary - tokens.shape[1], 1)
    filled = (rest.log() - math.log(others)).expand(-1, vocabulary)
    return filled.scatter(1, tokens.long(), known)


def check_logits_file(path: Path, task: TrainingTask) -> None:
    """For a command's beginning, so that long work does not end at a file that cannot be used or written.

    Raises:
        UsageError: more is learned of a teacher in `task` than logits, or they change from epoch to epoch.
        OutputError: `path` is no file, or lies where none can be written.
    """
    if task == "mlm" or task in HEADLESS:
        raise UsageError(
            f"`teacher_logits` does not go with `task={task}`",
            "Leave it out: the teacher runs with the model.",
        )
    refuse_output(path, "file", force=True)


def digest_of_examples(examples: Examples, teacher: str) -> str:
    """A hash of the examples' tokens and labels, and of the teacher's fingerprint."""
    digest = hashlib.sha256(teacher.encode())
    for row in range(len(examples.lengths)):
        for tensor in examples.batch([row]).with_labels.values():
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def read_logits(path: Path, digest: str) -> TeacherLogits:
    """Read a file of logits.

    Args:
        digest: see `digest_of_examples`.

    Raises:
        DataError: the file is damaged, or of another text or teacher.
    """
    try:
        with safe_open(path, "pt") as file:
            kept = file.metadata()
            found = TeacherLogits(*(file.get_tensor(name) for name in (LOG_PROBABILITIES, TOKENS, "ends")))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: holds no teacher's logits ({error})", "Name another file.") from error
    if kept != {"digest": digest}:
        raise DataError(
            f"{path}: these are logits of another teacher, or for another text or tokenizer",
            "Name a file that is not there yet: it is written.",
        )
    return found


@torch.no_grad()
def write_logits(
    path: Path, digest: str, teacher: Any, examples: Examples, batch_tokens: int, progress: Progress = silent
) -> None:
    """Run the teacher on all examples and write the file; it appears once it is whole."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    batches = examples.batches(batch_tokens)
    with progress("the teacher's logits", len(batches), "batches") as advance:
        for batch in batches:
            scored = batch.labels != IGNORED
            made = Logits(teacher, batch.arguments(teacher), scored.to(teacher.device))

            def likeliest(number: int, _place: slice, made: Logits = made) -> Tensor:
                logits = made.block(number).float().log_softmax(-1)
                values, tokens = logits.topk(min(KEPT, logits.shape[-1]))
                return torch.stack([values, tokens.float()])  # ids are exact up to 16 million

            values, tokens = torch.cat(made.each(likeliest), 1).cpu()
            counts = scored.view(len(scored), -1).sum(1).tolist()
            parts = zip(values.half().split(counts), tokens.int().split(counts), strict=True)
            found |= dict(zip(batch.indices, parts, strict=True))
            advance(1)
    ordered = [found[row] for row in range(len(found))]
    lengths = torch.tensor([0, *(len(values) for values, _ in ordered)])
    tensors = {
        LOG_PROBABILITIES: torch.cat([values for values, _ in ordered]),
        TOKENS: torch.cat([tokens for _, tokens in ordered]),
        "ends": lengths.cumsum(0),
    }
    begun = path.with_name(f"{path.name}.new")
    save_file(tensors, begun, {"digest": digest})
    begun.replace(path)
