"""Scores of attention heads (1905.10650, 3 and 4.1): read, merge, write.

Ids are always those of the original model. An array `[heads]` stands for the heads that an attention held when it
was scored, in the order of `HeadScores.heads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import StatisticsError, reason_of
from prunecli.results.arrays import MOST, checked_array
from prunecli.results.header import asked, joined, split_of
from prunecli.results.tabled import Row, Tabled, Tables
from prunecli.tensors.json_files import read_json

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
class ReportedHeads:
    """all-but-one: what the best head of each layer, chosen on other text, reaches (appendix A).

    Attributes:
        metric, examples: what the score is, and of how many.
        base: the score with all heads.
        only, p_value: attention's name -> score with this head alone, p-value of the difference.
    """

    metric: str
    examples: int
    base: float
    only: Mapping[str, float]
    p_value: Mapping[str, float]


@dataclass(frozen=True)
class HeadScores(Tabled):
    """heads.json: what one method says of every head.

    Attributes:
        method: `gradient` (eq. 2), `ablation` (3.2) or `all-but-one` (3.3).
        fingerprint: of the checkpoint that was run.
        model_type: as in config.json.
        task: whose loss or score it is: translation, classification, mlm, lm, embedding.
        examples: how many were run.
        heads: attention's name -> original ids of the heads that it held.
        values: attention's name -> `[heads]`. gradient: the sum over the examples of |Att_h(x)^T dL(x)/dAtt_h(x)|,
            or over all of their tokens; ablation: the score without the head; all-but-one: the score with this head
            alone in its layer.
        per: of the gradient method: what the absolute value is taken of.
        tokens: of the same, per token: attention's name -> how many tokens it attended from.
        metric: of ablation and all-but-one: what the score is (`chrf++`, `bleu`, `accuracy`, `cosine`, `loss`, …).
        base: of the same: the score with all heads.
        p_values: of the same, where significance was tested: attention's name -> `[heads]`.
        dtype: that the model was computed in; None where the file does not say it.
        also: of the same: scores in other metrics, from the same runs.
        reported: of all-but-one, where heads were chosen on other text than is reported.
        texts: pairs, languages or files that the heads were scored on, where they were named.
        split: of a directory of text.
        whole_files, mixed: see `GateStatistics`.
    """

    FORMAT: ClassVar[str] = "prunecli.heads/1"

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
    dtype: str | None = None
    also: tuple[HeadScores, ...] = ()
    reported: ReportedHeads | None = None
    texts: tuple[str, ...] = ()
    split: str | None = None
    whole_files: bool | None = None
    mixed: bool = False

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
        losses = {name: self.sign * ((self.base or 0.0) - score) for name, score in self.values.items()}
        arrays = self.means() if self.method == "gradient" else losses
        return {
            name: dict(zip(self.heads[name], array.tolist(), strict=True)) for name, array in arrays.items()
        }

    def best(self) -> dict[str, int]:
        """all-but-one: attention's name -> original id of its best single head (3.3); ties by place."""
        return {
            name: self.heads[name][int(np.argmax(self.sign * scores))]
            for name, scores in self.values.items()
            if len(scores)
        }

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> HeadScores:
        """The scores in a heads.json.

        Raises:
            StatisticsError: misshapen, or with values that no run could give.
        """
        try:
            method, model = payload["method"], payload["model"]
            if method not in METHODS:
                raise StatisticsError(f"{path}: method is {method!r}, not one of {', '.join(METHODS)}.")
            key = VALUES[method]
            heads = {str(name): tuple(ids) for name, ids in payload["heads"].items()}
            scores = cls(
                method=method,
                fingerprint=str(model["fingerprint"]),
                model_type=str(model["model_type"]),
                task=str(payload["task"]),
                examples=_count(payload["examples"], f"{path}: examples"),
                heads=heads,
                values=_arrays(payload[key], heads, f"{path}: {key}", signed=method != "gradient"),
                dtype=payload.get("dtype"),
                texts=tuple(map(str, payload.get("texts") or _texts(payload))),
                split=split_of(payload),
                whole_files=payload.get("whole_files"),
            )
            if method == "gradient":
                scores = _with_tokens(scores, payload, path)
            else:
                scores = replace(scores, metric=str(payload["metric"]), **_effects(scores, payload, path))
                also = (
                    replace(scores, metric=str(metric), **_effects(scores, effects, path))
                    for metric, effects in payload.get("also", {}).items()
                )
                scores = replace(scores, also=tuple(also))
            if not any(heads.values()):
                raise StatisticsError(f"{path}: no heads.", AGAIN)
            for name, ids in heads.items():
                whole = all(type(head) is int and 0 <= head <= MOST for head in ids)
                if not whole or len(set(ids)) != len(ids):
                    raise StatisticsError(
                        f"{path}: {name} has heads {list(ids)}; ids are whole and differ.", AGAIN
                    )
            if "reported" in payload:
                scores = replace(scores, reported=_reported(payload["reported"], scores, path))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            missing = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({reason_of(error)})"
            raise StatisticsError(f"{path}: the file {missing}.", AGAIN) from error
        return scores

    def to_json(self) -> dict[str, Any]:
        """The fields of heads.json beside those of the header."""
        payload: dict[str, Any] = {
            "method": self.method,
            "model": {"fingerprint": self.fingerprint, "model_type": self.model_type},
            "task": self.task,
            "examples": self.examples,
            **({"texts": list(self.texts)} if self.texts else {}),
            **({} if self.split is None else {"split": self.split}),
            "heads": {name: list(ids) for name, ids in self.heads.items()},
        }
        if self.method == "gradient":
            payload |= {"importance": self.per, **({"tokens": dict(self.tokens)} if self.tokens else {})}
        else:
            payload |= {"metric": self.metric, "base": self.base}
        payload[VALUES[self.method]] = _lists(self.values)
        if self.p_values:
            payload["p_value"] = _lists(self.p_values)
        if self.method == "all-but-one":
            payload["best"] = self.best()
        if self.dtype is not None:
            payload["dtype"] = self.dtype
        if self.whole_files is not None:
            payload["whole_files"] = self.whole_files
        if self.also:
            payload["also"] = {
                other.metric: {
                    "base": other.base,
                    VALUES[other.method]: _lists(other.values),
                    "p_value": _lists(other.p_values),
                }
                for other in self.also
            }
        if self.reported is not None:
            payload["reported"] = asdict(self.reported)
        return payload

    def _tables(self) -> Tables:
        """`heads`: a row for each head, of ablation and all-but-one for each metric; `best`: of each layer.

        gradient: `importance` is the mean that the sum is of: over the examples, or over the tokens (eq. 2).
        """
        if self.method == "gradient":
            rows = [
                {"attention": name, "head": head, "importance": float(mean), "sum": float(total)}
                for name, means in self.means().items()
                for head, mean, total in zip(self.heads[name], means, self.values[name], strict=True)
            ]
            return {"heads": rows}
        rows = [row for scores in (self, *self.also) for row in scores._effect_rows()]
        return {"heads": rows, "best": self._best_rows() if self.method == "all-but-one" else []}

    def _effect_rows(self) -> Iterator[Row]:
        for name, ids in self.heads.items():
            p_values = self.p_values.get(name)
            for index, head in enumerate(ids):
                value = float(self.values[name][index])
                yield {
                    "attention": name,
                    "head": head,
                    "metric": self.metric,
                    VALUES[self.method]: value,
                    "change": value - (self.base or 0.0),
                    "p_value": None if p_values is None else float(p_values[index]),
                }

    def _best_rows(self) -> list[Row]:
        """The best single head of each layer; on other text, where that was measured."""
        best, reported = self.best(), self.reported
        rows = [row for row in self._effect_rows() if best[row["attention"]] == row["head"]]
        if reported is not None:
            for row in rows:
                name = row["attention"]
                row |= {"only": reported.only[name], "p_value": reported.p_value[name]}
                row["change"] = row["only"] - reported.base
        return rows


def _texts(payload: Mapping[str, Any]) -> list[str]:
    """The pairs, languages or files that the command line names."""
    options = ("--pairs", "--langs", "--text", "--labelled")
    named = ",".join(value for option in options for value in asked(payload, option))
    return [name.strip() for name in named.split(",") if name.strip()]


def _lists(arrays: Mapping[str, Array]) -> dict[str, list[float]]:
    return {name: array.tolist() for name, array in arrays.items()}


def read_scores(path: Path) -> HeadScores:
    """Read a heads.json.

    Raises:
        StatisticsError: missing, cut short, not head scores, misshapen, with values that no run could give.
    """
    return HeadScores.from_json(read_json(path, HeadScores.FORMAT), path)


def _effects(scores: HeadScores, payload: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of ablation or all-but-one in one metric."""
    key = VALUES[scores.method]
    return {
        "base": _number(payload["base"], f"{path}: base"),
        "values": _arrays(payload[key], scores.heads, f"{path}: {key}"),
        "p_values": _arrays(payload["p_value"], scores.heads, f"{path}: p_value")
        if "p_value" in payload
        else {},
    }


def _reported(payload: Mapping[str, Any], scores: HeadScores, path: Path) -> ReportedHeads:
    only, p_value = (
        {name: _number(payload[key][name], f"{path}: reported {key} of {name}") for name in scores.best()}
        for key in ("only", "p_value")
    )
    examples = _count(payload["examples"], f"{path}: reported examples")
    base = _number(payload["base"], f"{path}: reported base")
    return ReportedHeads(str(payload["metric"]), examples, base, only, p_value)


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
    if type(value) is not int or not 1 <= value <= MOST:
        raise StatisticsError(f"{where} is {value!r}, not a count of at least 1.", AGAIN)
    return value


def _arrays(
    value: Mapping[str, Any], heads: Mapping[str, tuple[int, ...]], where: str, *, signed: bool = True
) -> dict[str, Array]:
    odd = sorted(set(value) ^ set(heads))
    if odd:
        which = "not" if odd[0] in heads else "only"
        raise StatisticsError(f"{where}: {odd[0]} is {which} there, unlike under heads.", AGAIN)
    return {
        name: checked_array(value[name], (len(ids),), f"{where} of {name}", signed=signed, remedy=AGAIN)
        for name, ids in heads.items()
    }


def _number(value: Any, where: str) -> float:
    return float(checked_array([value], (1,), where, signed=True, remedy=AGAIN)[0])


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
    kinds = {part.whole_files for part in parts}
    return replace(
        first,
        whole_files=first.whole_files if len(kinds) == 1 else None,
        mixed={True, False} <= kinds,
        examples=sum(part.examples for part in parts),
        values={
            name: sum((part.values[name] for part in parts[1:]), first.values[name]) for name in first.heads
        },
        tokens={name: sum(part.tokens[name] for part in parts) for name in first.tokens},
        texts=tuple(dict.fromkeys(text for part in parts for text in part.texts)),
        split=joined(part.split for part in parts),
    )
