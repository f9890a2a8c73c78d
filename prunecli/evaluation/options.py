"""How checkpoints are measured, at every task, which scores they must reach, and what they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli import demo
from prunecli.choices import Choices
from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.evaluation.significance import SAMPLES, SEED
from prunecli.results.evaluation import SCORES
from prunecli.tensors.hub.names import origin

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation

LEVEL = 0.05
"""A difference counts as significant below this p-value, unless another level is asked for."""


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


@dataclass(frozen=True)
class EvaluationOptions(Choices):
    """What an evaluation depends on beside the checkpoints and the text.

    Attributes:
        decoding: of translation; its `batch_tokens` hold at every task.
        device, dtype: as in `load_model`.
        samples: resamples of the significance test of translation; 0: no test.
        seed: of the resamples, and of the tokens that `mlm` hides.
        level: a difference counts as significant below this p-value; in (0, 1).
        spm: FLORES-200's SentencePiece model; None: where sacrebleu keeps it, or no spBLEU.
        comet: model of COMET, for its score; None: no such score.
        hypotheses: directory that translations are written to, or None.
        groups: file of groups of languages, for means by group; see `read_groups`.
        stride: of the windows of `lm`; None: context - 1.
        continuations: prompts of each text from which `lm` compares what models go on with; 0: none.
        memory: bytes in which `lm` and `mlm` run layer by layer; None: the whole model is held.
        spill_directory: with `memory`: as in `Resources`.
        examples: number of inputs to store with the outputs of all checkpoints: those where the outputs differ most.
        most_translations: limit on the translations of all checkpoints and pairs together; None: no limit.
        gate: scores that the checkpoints must reach; checked before the work, see `Gate.missed`.
    """

    decoding: DecodingOptions = field(default_factory=DecodingOptions)
    device: str = "auto"
    dtype: str = "auto"
    samples: int = SAMPLES
    seed: int = SEED
    level: float = LEVEL
    spm: Path | None = None
    comet: str | None = None
    hypotheses: Path | None = None
    groups: Path | None = None
    stride: int | None = None
    continuations: int = 0
    memory: int | None = None
    spill_directory: Path | None = None
    examples: int = 3
    most_translations: int | None = None
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.level < 1:
            raise UsageError(
                f"a significance level of {self.level:g}", "Choose one between 0 and 1, such as 0.05 or 0.01."
            )

        if self.continuations and self.memory is not None:
            raise UsageError(
                "--continuations does not go with --memory: layer by layer there is no decoding",
                "Leave one of them out.",
            )

    @property
    def given(self) -> dict[str, bool]:
        """Option that goes with some tasks only -> whether it was given."""
        values = {
            "--stride": self.stride,
            "--continuations": self.continuations or None,
            "--spm": self.spm,
            "--comet": self.comet,
            "--hypotheses": self.hypotheses,
            "--groups": self.groups,
            "--memory": self.memory,
        }
        return {name: value is not None for name, value in values.items()}


def labels_for(paths: Sequence[Path]) -> dict[str, Path]:
    """A short label for each checkpoint: its directory's name, `org/name` on the hub, "demo" for the bundled model.

    Where two share a name, both have their whole path; on the hub the commit.

    Raises:
        UsageError: a checkpoint is given twice.
    """
    resolved = [path.resolve() for path in paths]
    origins = [origin(path) for path in paths]
    whole = [
        f"{known['path']}@{known['revision'][:7]}" if "revision" in known else str(path)
        for path, known in zip(paths, origins, strict=True)
    ]
    for name, real in zip(whole, resolved, strict=True):
        if resolved.count(real) > 1:
            raise UsageError(f"{name} is given twice", "Name each checkpoint once.")
    bundled = {demo.CHECKPOINT.resolve(): "demo", demo.LM_CHECKPOINT.resolve(): "demo-lm"}
    names = [bundled.get(real) or known["path"] for real, known in zip(resolved, origins, strict=True)]
    return {
        (name if names.count(name) == 1 else long): path
        for name, long, path in zip(names, whole, paths, strict=True)
    }
