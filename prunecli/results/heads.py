"""Scores of attention heads (1905.10650, 3 and 4.1): read, merge, write, and match with a checkpoint.

Ids are always those of the original model. An array `[heads]` stands for the heads that an attention held when it
was scored, in the order of `HeadScores.heads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError
from prunecli.tensors.documents import read_json

if TYPE_CHECKING:
    from prunecli.model.attention import AttentionLayer
    from prunecli.model.checkpoint import Checkpoint

FORMAT = "prunecli.heads/1"
AGAIN = "Score the heads again: prunecli score-heads."

Array = NDArray[np.float64]
Method = Literal["gradient", "ablation", "all-but-one"]
METHODS: tuple[Method, ...] = get_args(Method)
Per = Literal["example", "token"]
PER: tuple[Per, ...] = get_args(Per)
"""What the absolute value of the gradient method is taken of: the sum over an example's tokens, or each token."""

LOWER_IS_BETTER = ("loss", "perplexity")
VALUES: dict[Method, str] = {"gradient": "sum", "ablation": "without", "all-but-one": "only"}
"""Method -> the key of heads.json that holds its values."""


@dataclass(frozen=True)
class HeadScores:
    """What one method says of every head.

    Attributes:
        method: `gradient` (eq. 2), `ablation` (3.2) or `all-but-one` (3.3).
        fingerprint: of the checkpoint that was run.
        model_type: as in config.json.
        task: whose loss or score it is: translation, classification, mlm, lm.
        examples: how many were run.
        heads: attention's name -> original ids of the heads that it held.
        values: attention's name -> `[heads]`. gradient: the sum over the examples of |Att_h(x)^T dL(x)/dAtt_h(x)|,
            or over all of their tokens; ablation: the score without the head; all-but-one: the score with this head
            alone in its layer.
        per: of the gradient method: what the absolute value is taken of.
        tokens: of the same, per token: attention's name -> how many tokens it attended from.
        metric: of ablation and all-but-one: what the score is (`chrf++`, `bleu`, `accuracy`, `loss`, …).
        base: of the same: the score with all heads.
        p_values: of the same, where significance was tested: attention's name -> `[heads]`.
    """

    method: Method
    fingerprint: str
    model_type: str
    task: str
    examples: int
    heads: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Array]
    per: Per = "example"
    tokens: Mapping[str, int] = field(default_factory=dict)
    metric: str | None = None
    base: float | None = None
    p_values: Mapping[str, Array] = field(default_factory=dict)

    @property
    def sign(self) -> int:
        """1 where a higher score is better, -1 for a loss."""
        return -1 if self.metric in LOWER_IS_BETTER else 1

    def means(self) -> dict[str, Array]:
        """gradient: attention's name -> `[heads]`: the sums over how many examples, or tokens, they are of (eq. 2)."""
        return {name: sums / self.tokens.get(name, self.examples) for name, sums in self.values.items()}

    def importance(self) -> dict[str, dict[int, float]]:
        """Attention's name -> original id -> importance of the head, not yet normalised.

        gradient: I_h, the mean over the examples (eq. 2), or over the tokens. ablation: what the score loses
        without the head, negative where the model is better off.

        Raises:
            StatisticsError: all-but-one, which compares the heads of one layer only.
        """
        if self.method == "all-but-one":
            raise StatisticsError(
                "all-but-one scores compare the heads of one layer with each other, not those of the whole model.",
                "Score the heads with --method gradient or --method ablation.",
            )
        if self.method == "gradient":
            found = self.means()
        else:
            found = {name: self.sign * ((self.base or 0.0) - score) for name, score in self.values.items()}
        return {
            name: dict(zip(self.heads[name], array.tolist(), strict=True)) for name, array in found.items()
        }

    def best(self) -> dict[str, int]:
        """all-but-one: attention's name -> original id of its best single head (3.3); ties by place."""
        return {
            name: self.heads[name][int(np.argmax(self.sign * scores))]
            for name, scores in self.values.items()
            if len(scores)
        }


def read_scores(path: Path) -> HeadScores:
    """Read a heads.json.

    Raises:
        StatisticsError: missing, cut short, not head scores, misshapen, with values that no run could give.
    """
    payload = read_json(path, FORMAT)
    try:
        method, model = payload["method"], payload["model"]
        if method not in METHODS:
            raise StatisticsError(f"{path}: method is {method!r}, not one of {', '.join(METHODS)}.")
        heads = {str(name): tuple(ids) for name, ids in payload["heads"].items()}
        scores = HeadScores(
            method=method,
            fingerprint=str(model["fingerprint"]),
            model_type=str(model["model_type"]),
            task=str(payload["task"]),
            examples=_count(payload["examples"], f"{path}: examples"),
            heads=heads,
            values=_arrays(payload[VALUES[method]], heads, f"{path}: {VALUES[method]}"),
        )
        if method == "gradient":
            scores = _with_tokens(scores, payload, path)
        else:
            scores = replace(
                scores,
                metric=str(payload["metric"]),
                base=float(_array([payload["base"]], 1, f"{path}: base")[0]),
                p_values=_arrays(payload["p_value"], heads, f"{path}: p_value")
                if "p_value" in payload
                else {},
            )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        missing = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({error})"
        raise StatisticsError(f"{path}: the file {missing}.", AGAIN) from error
    return _sensible(scores, path)


def _sensible(scores: HeadScores, path: Path) -> HeadScores:
    if not any(scores.heads.values()):
        raise StatisticsError(f"{path}: no heads.", AGAIN)
    for name, ids in scores.heads.items():
        if not all(type(head) is int and head >= 0 for head in ids) or len(set(ids)) != len(ids):
            raise StatisticsError(f"{path}: {name} has heads {list(ids)}; ids are whole and differ.", AGAIN)
    for name, array in scores.values.items():
        if scores.method == "gradient" and (array < 0).any():
            raise StatisticsError(f"{path}: sum of {name} holds negative values.", AGAIN)
    return scores


def _with_tokens(scores: HeadScores, payload: Mapping[str, Any], path: Path) -> HeadScores:
    """The scores, with what the absolute values were taken of; files of prunecli 0.1.0 do not say it."""
    per = payload.get("importance", "example")
    if per == "example":
        return scores
    if per not in PER:
        raise StatisticsError(f"{path}: importance is {per!r}, not one of {', '.join(PER)}.", AGAIN)
    tokens = payload["tokens"]
    if set(tokens) != set(scores.heads):
        raise StatisticsError(f"{path}: tokens are not those of the attentions under heads.", AGAIN)
    counts = {name: _count(tokens[name], f"{path}: tokens of {name}") for name in scores.heads}
    return replace(scores, per="token", tokens=counts)


def _count(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        raise StatisticsError(f"{where} is {value!r}, not a count of at least 1.", AGAIN)
    return value


def _arrays(value: Mapping[str, Any], heads: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Array]:
    odd = sorted(set(value) ^ set(heads))
    if odd:
        which = "not" if odd[0] in heads else "only"
        raise StatisticsError(f"{where}: {odd[0]} is {which} there, unlike under heads.", AGAIN)
    return {name: _array(value[name], len(ids), f"{where} of {name}") for name, ids in heads.items()}


def _array(value: Any, length: int, where: str) -> Array:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise StatisticsError(f"{where} is not an array of numbers.", AGAIN) from error
    if array.shape != (length,):
        raise StatisticsError(f"{where} holds {array.size} values; {length} are needed.", AGAIN)
    if not np.isfinite(array).all():
        raise StatisticsError(f"{where} holds NaN or infinity.", AGAIN)
    return array


def scores_payload(scores: HeadScores) -> dict[str, Any]:
    """The fields of heads.json beside those of `documents.header`."""
    payload: dict[str, Any] = {
        "method": scores.method,
        "model": {"fingerprint": scores.fingerprint, "model_type": scores.model_type},
        "task": scores.task,
        "examples": scores.examples,
        "heads": {name: list(ids) for name, ids in scores.heads.items()},
    }
    if scores.method == "gradient":
        payload["importance"] = scores.per
    if scores.tokens:
        payload["tokens"] = dict(scores.tokens)
    if scores.method != "gradient":
        payload |= {"metric": scores.metric, "base": scores.base}
    payload[VALUES[scores.method]] = {name: array.tolist() for name, array in scores.values.items()}
    if scores.p_values:
        payload["p_value"] = {name: array.tolist() for name, array in scores.p_values.items()}
    if scores.method == "all-but-one":
        payload["best"] = scores.best()
    return payload


_ALIKE = {
    "fingerprint": "the models that they are of",
    "model_type": "their model types",
    "task": "their tasks",
    "heads": "the heads that were scored",
    "per": "their importances (per example or per token)",
}
"""What scores must have in common to be added up, and how a message calls it."""


def merge(parts: Sequence[HeadScores], names: Sequence[str] | None = None) -> HeadScores:
    """One score from several of one model: sums and examples are added, so nothing is lost.

    Args:
        parts: at least one; several only of the gradient method.
        names: how messages call them; default: scores 1, 2, ...

    Raises:
        StatisticsError: of different models, heads or tasks, or not sums.
    """
    names = [f"scores {number}" for number in range(1, len(parts) + 1)] if names is None else names
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        if len(parts) > 1 and part.method != "gradient":
            raise StatisticsError(
                f"{name}: scores of the method {part.method} are no sums, and cannot be merged.",
                "Give one file, or several of --method gradient.",
            )
        for attribute, what in _ALIKE.items():
            if getattr(first, attribute) != getattr(part, attribute):
                raise StatisticsError(
                    f"{names[0]} and {name} cannot be merged: {what} differ.",
                    "Merge only scores of one model, one task and one --importance.",
                )
    if len(parts) == 1:
        return first
    return replace(
        first,
        examples=sum(part.examples for part in parts),
        values={
            name: sum((part.values[name] for part in parts[1:]), first.values[name]) for name in first.heads
        },
        tokens={name: sum(part.tokens[name] for part in parts) for name in first.tokens},
    )


def check_matches(scores: HeadScores, checkpoint: Checkpoint, layers: Sequence[AttentionLayer]) -> None:
    """Refuse scores of another model, or of the same after another pruning.

    Those of the model that a pruned checkpoint was made from are right too: ids are the original ones, and heads
    that are no longer there do not matter.

    Args:
        scores: what to check.
        checkpoint: the one at hand.
        layers: its attentions.

    Raises:
        StatisticsError: another fingerprint, or heads of the checkpoint that were not scored.
    """
    known = {checkpoint.fingerprint, *checkpoint.structure.fingerprints()}
    if scores.fingerprint not in known:
        raise StatisticsError(
            f"The scores are of another model than {checkpoint.path}, or of another pruning of it.",
            "Score the heads of this checkpoint: prunecli score-heads.",
        )
    for layer in layers:
        lacking = [head for head in layer.heads if head not in scores.heads.get(layer.name, ())]
        if lacking:
            raise StatisticsError(
                f"The scores lack head {lacking[0]} of {layer.name}, which {checkpoint.path} holds.",
                "Score the heads of this checkpoint: prunecli score-heads.",
            )
