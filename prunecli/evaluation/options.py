"""How checkpoints are measured, at every task, which scores they must reach, and what they are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from prunecli import demo
from prunecli.errors import UsageError
from prunecli.evaluation.on_text import DEVICE, BatchOptions, DecodingOptions, RunOptions
from prunecli.options import (
    COMPUTE_DTYPE,
    RUNNING_DTYPE,
    ComputeDtype,
    Counts,
    Options,
    RunningDtype,
    advanced_option,
    compute_option,
    hidden_option,
    option,
    text_option,
)
from prunecli.tensors.hub.names import origin

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation

RATED = {
    "translation": ("chrf++",),
    "lm": ("perplexity",),
    "mlm": ("loss",),
    "classification": ("accuracy",),
    "embedding": ("spearman", "retrieval"),
}
"""Task -> the scores that `min_ratio` applies to."""


class EvaluationOptions(RunOptions):
    """Options of `evaluate`, apart from the checkpoints and the text."""

    beam: int = compute_option("Beam size; 1 is greedy search.", 4, ge=1)
    batch_tokens: int = compute_option("Padded tokens in a batch; fewer take less memory.", 2048, ge=1)
    dtype: RunningDtype = RUNNING_DTYPE
    max_new_tokens: int | None = compute_option(
        "Longest output. Default: 3 x source tokens + 50 (--continuations: 64).", ge=1
    )
    stride: int | None = text_option(
        "lm: tokens from one window to the next; fewer make windows overlap. Default: context - 1.",
        ge=1,
        hidden=True,
    )
    continuations: int = text_option(
        "lm: prompts of each text whose greedy continuations are compared with the first checkpoint's.",
        0,
        ge=0,
        excludes="memory",
    )
    groups: Path | None = text_option(
        "Also means by group of languages: a language, a tab and its group on each line, or {{language: group}} "
        "in .json.",
        role="text",
        hidden=True,
    )
    spm: Path | None = hidden_option(
        "FLORES-200's SentencePiece model, for spBLEU. Default: where sacrebleu stores it.", role="text"
    )
    comet: str | None = hidden_option(
        "Also COMET with this model (Unbabel/wmt22-comet-da, or a .ckpt file); needs comet-score.",
        metavar="MODEL",
    )
    hypotheses: Path | None = advanced_option(
        "Store the outputs, in a directory for each checkpoint.", metavar="DIR", role="output"
    )
    examples: int = hidden_option(
        "Number of inputs to show with all outputs, those where the outputs differ most (lm: with --continuations).",
        3,
        ge=0,
    )
    samples: int = hidden_option(
        "Resamples of the significance test; 0: no test.", 1000, flag="--bootstrap", ge=0
    )
    level: float = hidden_option(
        "A difference counts as significant below this p-value.",
        0.05,
        flag="--significance",
        metavar="LEVEL",
        gt=0,
        lt=1,
    )
    seed: int = hidden_option("Seed of the resamples, and of the tokens that mlm hides.", 12345, ge=1)
    min_ratio: float | None = hidden_option(
        "Exit with status 1 if another checkpoint has less than this share of the first checkpoint's score.",
        metavar="RATIO",
        ge=0,
    )
    least: tuple[str, ...] = advanced_option(
        "Exit with status 1 if a score is lower (chrF++=50); may be given again.",
        (),
        flag="--min",
        metavar="SCORE=X",
        repeated=True,
    )
    most: tuple[str, ...] = advanced_option(
        "Exit with status 1 if a score is higher (perplexity=20); may be given again.",
        (),
        flag="--max",
        metavar="SCORE=X",
        repeated=True,
    )

    @property
    def decoding(self) -> DecodingOptions:
        """How translations are searched for."""
        return DecodingOptions(self.beam, self.batch_tokens, self.max_new_tokens)

    @property
    def limits(self) -> Iterator[tuple[str, str, float]]:
        """Yield each limit: "least" or "most", the score in lower case, as in evaluation.json, and the value.

        Raises:
            UsageError: a limit without a number.
        """
        for name in ("least", "most"):
            for text in getattr(self, name):
                score, _, value = text.rpartition("=")
                try:
                    yield name, score.strip().lower(), float(value)
                except ValueError as error:
                    raise UsageError(f"`{name}={text}`: no number", f"Write `{name}=chrF++=50`.") from error

    def check_limits(self, task: str, checkpoints: int) -> None:
        """Refuse limits that say nothing about `task` or about so many checkpoints.

        Raises:
            UsageError: a limit without a number, a name that is no score of `task`, or a ratio and one checkpoint.
        """
        from prunecli.results.evaluation import SCORES  # imports numpy

        if self.min_ratio is not None and checkpoints < 2:
            raise UsageError(
                "`min_ratio` compares checkpoints, one was given", "Name the one to compare with first."
            )
        for _, name, _ in self.limits:
            if name not in SCORES[task]:
                raise UsageError(f"{name}: no score of {task}", f"Choose one of {', '.join(SCORES[task])}.")

    def missed(self, evaluation: Evaluation) -> Iterator[str]:
        """One line for each limit that a checkpoint does not keep, or whose score was not measured."""
        from prunecli.results.evaluation import LOWER_IS_BETTER  # imports numpy

        scores = {result.checkpoint: result.main for result in evaluation.results}
        for word, name, limit in self.limits:
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
            yield f"{' or '.join(RATED[evaluation.task])} was not measured, which `min_ratio` compares."
        for name in rated:
            for label, own in others:
                pair = (own[name], first[name])
                score, of = reversed(pair) if name in LOWER_IS_BETTER else pair
                if score < self.min_ratio * of:
                    yield (
                        f"{label}: {name} is {own[name]:,.4g}, that of {baseline} {first[name]:,.4g}; "
                        f"a ratio of at least {self.min_ratio:g} was asked for."
                    )


class LatencyOptions(Options):
    """Options of `bench-latency`, apart from the checkpoints and the text."""

    sentences: int = text_option("Sentences, examples or prompts per run.", 8, ge=1)
    batch_sizes: Annotated[Counts, Field(min_length=1)] = option(
        "Sentences at a time; several with commas. Default: 1.", (1,), flag="--batch-size", metavar="N,…"
    )
    beams: Counts | None = option(
        "Translation: beam size; several with commas. Default: 5.", flag="--beam", metavar="N,…"
    )
    new_tokens: int = option(
        "Tokens generated per sentence or prompt, the same for all checkpoints.",
        32,
        flag="--max-new-tokens",
        ge=2,
    )
    runs: int = compute_option("Timed runs.", 5, ge=1)
    warm_up: int = compute_option("Runs before them that do not count.", 1, flag="--warmup", ge=0)
    threads: int | None = compute_option(
        "CPU threads. Default: one for small models, else the number of idle cores.", ge=1
    )
    device: str = DEVICE
    dtype: RunningDtype = RUNNING_DTYPE
    memory: bool = compute_option(
        "Leave out load time and peak memory, for which each checkpoint is loaded once more.",
        True,
        flag="--no-memory",
    )


class SimilarityOptions(BatchOptions):
    """Options of `compare-models`, apart from the checkpoints and the text.

    Attributes:
        context: tokens that a plain text is cut to; None: see `window_length`.
    """

    measure: Literal["cka", "lns", "both"] = option(
        "cka: linear CKA; lns: local neighbourhood similarity; both.", "both"
    )
    neighbours: float = advanced_option("Neighbours of LNS, as a share of the sentences.", 0.05, ge=0, le=1)
    random_baseline: int | None = advanced_option(
        "Also the similarity to random weights of CHECKPOINT's architecture: the mean over this number of seeds.",
        metavar="SEEDS",
        ge=1,
    )
    dtype: ComputeDtype = COMPUTE_DTYPE
    context: int | None = None


def labels_for(paths: Sequence[Path]) -> dict[str, Path]:
    """A short label for each checkpoint: its directory's name, `org/name` on the hub, "demo" for the bundled model.

    Where two share a name, both have their whole path; on the hub the commit.

    Raises:
        UsageError: a checkpoint is given twice.
    """
    bundled = {demo.CHECKPOINT.resolve(): "demo", demo.LM_CHECKPOINT.resolve(): "demo-lm"}
    resolved = [path.resolve() for path in paths]
    names, whole = [], []
    for path, real in zip(paths, resolved, strict=True):
        known = origin(path)
        names.append(bundled.get(real) or known["path"])
        whole.append(f"{known['path']}@{known['revision'][:7]}" if "revision" in known else str(path))
        if resolved.count(real) > 1:
            raise UsageError(f"{whole[-1]} is given twice", "Name each checkpoint once.")
    return {
        (name if names.count(name) == 1 else long): path
        for name, long, path in zip(names, whole, paths, strict=True)
    }
