"""The model that another one learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prunecli.errors import UsageError
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.running.encoding import require_task
from prunecli.running.examples import Examples
from prunecli.running.lengths import position_count, vocabulary_size
from prunecli.text.tasks import TrainingTask
from prunecli.text.tokens import load_tokenizer
from prunecli.training.options import TrainingOptions

COMPARED = ("decoder_start_token_id", "pad_token_id")
"""Keys of both configs that shape what the models are given."""


def choose_attention(model: Any, device: torch.device, dtype: str) -> None:
    """Have `model` run the attention that is fastest here.

    On a CPU in bfloat16 torch's fused one is slow: of an update of a 6 + 6 layer model it takes a quarter.
    """
    if device.type == "cpu" and dtype == "bfloat16":
        model.set_attn_implementation("eager")


def load_teacher(
    options: TrainingOptions, student: Any, tokenizer: Any, task: TrainingTask, device: torch.device
) -> Any:
    """The teacher in evaluation mode, on `device`, its weights frozen.

    Raises:
        UsageError: another vocabulary, or other special tokens, where vectors of texts are not all that is compared;
            another width where hidden states are.
        PruneError: it cannot be loaded, or is for another task.
    """
    path, dtype = options.teacher, options.dtype
    assert path is not None
    with open_model(path) as checkpoint:
        directory, size = checkpoint.path, checkpoint.config.get("vocab_size")
    by_token = task != "embedding" or options.loss.hidden > 0
    own_size = vocabulary_size(student.config)
    if by_token and None not in (size, own_size) and size != own_size:
        raise UsageError(
            f"{path}: the teacher has a vocabulary of {size:,}, the model one of {own_size:,}",
            "A teacher must predict the same tokens: name a model with the same tokenizer.",
        )
    if by_token:
        theirs, ours = load_tokenizer(directory).get_vocab(), tokenizer.get_vocab()
        if odd := [token for token in {*theirs, *ours} if theirs.get(token) != ours.get(token)]:
            token = min(odd)
            raise UsageError(
                f"{path}: the teacher has another vocabulary: {len(odd):,} tokens differ, such as {token!r} "
                f"({theirs.get(token)}, the model's is {ours.get(token)})",
                "A teacher must predict the same tokens: name a model with the same tokenizer.",
            )
    teacher = load_model(directory, device=device, dtype=dtype).requires_grad_(False)
    if task != "feature-extraction":
        require_task(teacher, task)
    teacher.config.use_cache = False
    choose_attention(teacher, device, dtype)
    for key in COMPARED if by_token else ():
        own, other = getattr(student.config, key, None), getattr(teacher.config, key, None)
        if own != other:
            raise UsageError(
                f"{path}: the teacher's {key} is {other}, the model's is {own}",
                "A teacher must be given the same tokens: name another one.",
            )
    if options.loss.hidden:
        own, other = (getattr(model.config, "hidden_size", None) for model in (student, teacher))
        if own != other:
            raise UsageError(
                f"{path}: the teacher's hidden states are {other} wide, the model's {own}",
                "Leave out --hidden-weight, or name a teacher of the same width.",
            )
    return teacher


def require_positions(path: Path, teacher: Any, examples: Examples) -> None:
    """Refuse a teacher that cannot read what the model is trained on.

    Raises:
        UsageError: an example is longer than its positions.
    """
    longest, positions = max(max(lengths) for lengths in examples.lengths), position_count(teacher)
    if positions is not None and longest > positions:
        raise UsageError(
            f"{path}: the teacher has {positions:,} positions, an example has {longest:,} tokens",
            f"Choose --context {positions} for a language model, or leave longer sentences out.",
        )
