"""Scores that an evaluation must reach, for scripts that stop where a model lost too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prunecli.errors import UsageError
from prunecli.results.evaluation import SCORES

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation

LOWER_IS_BETTER = ("perplexity", "loss")
"""Scores of `RATED` whose ratio is the first checkpoint's score divided by the other one."""
RATED: Mapping[str, tuple[str, ...]] = {
    "translation": ("chrf++",),
    "lm": ("perplexity",),
    "mlm": ("loss",),
    "classification": ("accuracy",),
    "embedding": ("spearman", "retrieval"),
}
"""Task -> the scores that `min_ratio` applies to."""
OF_OUTPUTS = ("length_ratio", "over_generated")
"""Scores of translation beside those of `SCORES`."""


@dataclass(frozen=True)
class Gate:
    """Limits of scores.

    Attributes:
        min_ratio: least score of every other checkpoint relative to the first one, at the score that `RATED` names.
        least: score -> least value, of every checkpoint.
        most: score -> greatest value, of every checkpoint.
    """

    min_ratio: float | None = None
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)

    def check(self, task: str, checkpoints: int) -> None:
        """Refuse limits that say nothing about `task` or about so many checkpoints.

        Raises:
            UsageError: a name that is no score of `task`, or a ratio and one checkpoint.
        """
        if self.min_ratio is not None and checkpoints < 2:
            raise UsageError(
                "--min-ratio compares checkpoints, one was given", "Name the one to compare with first."
            )
        known = [*SCORES[task], *(OF_OUTPUTS if task == "translation" else ())]
        for name in (*self.least, *self.most):
            if name not in known:
                raise UsageError(f"{name}: no score of {task}", f"Choose one of {', '.join(known)}.")

    def missed(self, evaluation: Evaluation) -> Iterator[str]:
        """One line for each limit that a checkpoint does not keep, or whose score was not measured."""
        scores = {result.checkpoint: result.mean or result.scores for result in evaluation.results}
        limits = [("least", name, limit) for name, limit in self.least.items()]
        limits += [("most", name, limit) for name, limit in self.most.items()]
        for word, name, limit in limits:
            found = {label: own[name] for label, own in scores.items() if name in own}
            if not found:
                yield f"{name} was not measured, and at {word} {limit:g} was asked for."
            for label, score in found.items():
                if score < limit if word == "least" else score > limit:
                    yield f"{label}: {name} is {score:,.4g}; at {word} {limit:g} was asked for."
        if self.min_ratio is None:
            return
        (baseline, first), *others = scores.items()
        rated = [name for name in RATED[evaluation.task] if name in first]
        if not rated:
            yield f"{' or '.join(RATED[evaluation.task])} was not measured, which --min-ratio compares."
        for name in rated:
            for label, own in others:
                pair = (own[name], first[name])
                score, of = reversed(pair) if name in LOWER_IS_BETTER else pair
                if score < self.min_ratio * of:
                    yield (
                        f"{label}: {name} is {own[name]:,.4g}, that of {baseline} {first[name]:,.4g}; "
                        f"a ratio of at least {self.min_ratio:g} was asked for."
                    )
