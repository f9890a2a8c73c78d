"""The losses of examples: what a model is trained for in translation, classification and language modelling.

An example's loss is the mean cross-entropy of its counted tokens (in nats; of its class in classification). It does
not depend on the batch that the example is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prunecli.errors import CheckpointError, DataError, UnsupportedModelError, UsageError
from prunecli.evaluation.decoding import max_positions
from prunecli.modules.logits import Logits
from prunecli.text.tasks import TASKS, TaskName
from prunecli.text.tokens import tokenized

IGNORED = -100
"""A label that is not counted, as everywhere in transformers."""


@dataclass(frozen=True)
class Batch:
    """Examples that run together.

    Attributes:
        inputs: arguments of the model without labels, on the CPU.
        labels: `[B, T]`, or `[B]` in classification; -100 is not counted. For `lm`, labels[:, t] is the token at t,
            which the model predicts at t - 1.
        indices: which examples the rows are.
    """

    inputs: dict[str, Tensor]
    labels: Tensor
    indices: tuple[int, ...]


def require_task(model: Any, task: TaskName) -> None:
    """Refuse a model without the head that a task needs.

    Raises:
        UnsupportedModelError: the model has another head, or none.
    """
    _require_sound(model.config)
    name = type(model).__name__
    generates, pair = bool(model.can_generate()), bool(getattr(model.config, "is_encoder_decoder", False))
    able = {
        "translation": generates and pair,
        "classification": name.endswith("ForSequenceClassification"),
        "mlm": name.endswith("ForMaskedLM"),
        "lm": generates and not pair,
    }
    if not able[task]:
        others = [other for other in TASKS if able[other]]
        raise UnsupportedModelError(
            f"{task}: the model is a {name}, which has no head for it",
            f"It can do: {', '.join(others)}." if others else "Name a checkpoint with the head of the task.",
        )


def _require_sound(config: Any) -> None:
    """Refuse tokens with a part of their own that no row of the table stands for, and dropouts that cannot be."""
    for key in ("decoder_start_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(config, key, None)
        if value is not None and (type(value) is not int or value >= config.vocab_size):
            raise CheckpointError(
                f"config.json: {key} is {value!r}; the model has the tokens 0 to {config.vocab_size - 1}",
                "Correct the value.",
            )
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, (int, float)) and not 0 <= value <= 1:
            raise CheckpointError(
                f"config.json: {key} is {value}, not a number from 0 to 1", "Correct the value."
            )


def token_losses(model: Any, batch: Batch, task: TaskName) -> tuple[Tensor, Tensor]:
    """Sum of the counted tokens' cross-entropies of each example, and how many there are.

    Returns:
        sums `[B]` float32 on the model's device, differentiable; counts `[B]` int64 on the CPU. In classification the
        one class of an example counts as its token.
    """
    inputs = {name: value.to(model.device) for name, value in batch.inputs.items()}
    if task in ("translation", "lm"):
        inputs["use_cache"] = False  # type: ignore[assignment]
    labels = batch.labels
    if task == "lm":
        labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    kept = labels != IGNORED
    counts = kept.sum(dim=1) if labels.dim() > 1 else torch.ones_like(labels)
    targets, where = labels[kept].to(model.device), kept.to(model.device)
    logits = Logits(model, inputs, where)

    def losses(number: int, place: slice) -> Tensor:
        return functional.cross_entropy(logits.block(number).float(), targets[place], reduction="none")

    chosen = torch.cat(logits.each(losses))
    if labels.dim() < 2:
        return chosen, counts
    return chosen.new_zeros(labels.shape).masked_scatter(where, chosen).sum(dim=1), counts


def example_losses(model: Any, batch: Batch, task: TaskName) -> Tensor:
    """Mean loss of each example's counted tokens, `-1/T sum_t log p(y_t | ...)`; of its class in classification.

    Args:
        model: in evaluation mode, with the task's head (`require_task`).

    Returns:
        `[B]` float32 on the model's device, differentiable; 0 for an example without counted tokens.
    """
    sums, counts = token_losses(model, batch, task)
    return sums / counts.clamp(min=1).to(sums.device)


def require_finite(losses: Tensor, batch: Batch) -> None:
    """Refuse losses that nothing can be computed from.

    Raises:
        DataError: a loss is NaN or infinite; the message names the example.
    """
    finite = torch.isfinite(losses).tolist()
    if not all(finite):
        row = finite.index(False)
        raise DataError(
            f"example {batch.indices[row] + 1:,}: the loss is {losses[row].item()}, not a finite number",
            "The weights are damaged, or overflow the type: try --dtype float32.",
        )


DEFAULT_CONTEXT = 2048
"""Tokens of a window at most where none are asked for: one of all of a model's positions may not fit in memory."""


def position_count(model: Any) -> int | None:
    """Tokens that the model has positions for, or None where nothing bounds them."""
    bounds = [max_positions(model.config)]
    embeddings = getattr(getattr(model, "base_model", None), "embeddings", None)
    places = getattr(embeddings, "position_embeddings", None)
    if isinstance(places, torch.nn.Embedding) and places.padding_idx is not None:
        # RoBERTa and its kin count positions from behind the padding's.
        bounds.append(places.num_embeddings - places.padding_idx - 1)
    return min((bound for bound in bounds if bound is not None), default=None)


def context_length(model: Any, tokenizer: Any) -> int | None:
    """Tokens that the model has positions for and its tokenizer allows, or None where nothing bounds them."""
    bounds = [position_count(model)]
    # A tokenizer that knows no bound says so with a number beyond all bounds.
    bounds.append(tokenizer.model_max_length if tokenizer.model_max_length < 1 << 30 else None)
    return min((bound for bound in bounds if bound is not None), default=None)


def window_length(model: Any, tokenizer: Any, asked: int | None = None) -> int:
    """Tokens of the longest window of a text: `asked`, or else those that fit, `DEFAULT_CONTEXT` at most.

    Raises:
        UsageError: the model has fewer positions than `asked`.
    """
    if asked is None:
        return min(context_length(model, tokenizer) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    positions = position_count(model)
    if positions is not None and asked > positions:
        raise UsageError(
            f"--context {asked:,}: the model has {positions:,} positions", f"Give at most {positions:,}."
        )
    return asked


def padding_id(model: Any, tokenizer: Any) -> int:
    """The id that fills up rows; any would do, since it is masked, where neither model nor tokenizer has one."""
    for value in (model.config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(value, int) and value >= 0:  # -1 stands for none in some configs
            return value
    return 0


def encoded(tokenizer: Any, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Token ids of each text, as the tokenizer makes them; `options` as it takes them."""
    # Longer than the model takes is no news here.
    return [list(row) for row in tokenized(tokenizer, list(texts), verbose=False, **options)["input_ids"]]
