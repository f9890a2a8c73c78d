"""Choose the attention heads to keep, from scores (1905.10650, 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import fsum, sqrt

import numpy as np

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.options import HeadOptions
from prunecli.methods.units import by_scores, drawn, kept_by_file, plan
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.find_axes import axes_of
from prunecli.model.parts import KINDS
from prunecli.model.stock import uniform_heads
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Array
from prunecli.selection.select import Budget
from prunecli.selection.selection import Selection

DEFAULT_NORMALIZE = {"gradient": "per-layer", "ablation": "none"}
"""The paper normalises I_h (4.1), and says nothing of the kind of differences of scores (4.2)."""


def plan_heads(checkpoint: Checkpoint, options: HeadOptions) -> Selection:
    """Choose the heads to keep.

    Raises:
        UnsupportedModelError: the family is not declared.
        StatisticsError: damaged files, of another model, or that rank no heads.
        UsageError: options that contradict each other, or that remove more heads than there are.
    """
    options.check_amount()
    axes = axes_of(checkpoint, "head")
    if options.keep is not None:
        options.refuse_beside("keep", ("ratio", "count", "attention", "least", "uniform", "normalize"))
        return kept_by_file(checkpoint, options, axes)
    is_all = options.attention == KINDS
    present = [*dict.fromkeys(axis.attention for axis in axes)]
    for kind in () if is_all else options.attention:
        if kind not in present:
            raise UsageError(
                f"`attention={kind}`: the model has no such attention.", f"It has {', '.join(present)}."
            )
    chosen = [axis for axis in axes if axis.attention in options.attention]
    even = uniform_heads(checkpoint) if options.uniform else None
    if even == ():
        family = checkpoint.require_architecture()
        why = family.stock_fault or f"a config of type {family.model_type} cannot say how many heads are left"
        raise UsageError(
            f"`uniform`: {checkpoint.path} cannot lose heads and be a stock model: {why}.",
            "Leave `uniform` out: the result then opens only where prunecli is installed.",
        )
    budget = Budget(options.share, options.count, scope="model", least=options.least, even=even)
    normalize, method = None, None
    if options.metric == "random":
        ranking = drawn(axes, options.seed)
    else:
        scores = scores_for(checkpoint, options.scores, "head")
        try:
            worth = scores.importance()
        except StatisticsError as error:
            files = "".join(f"{path}: " for path in options.score_files[:1])
            raise StatisticsError(f"{files}{error.message}", error.remedy) from error
        normalize = options.normalize or DEFAULT_NORMALIZE[scores.method]
        method, by, normalised = scores.method, "", "not normalised"
        if normalize == "per-layer":
            worth, by, normalised = (
                normalized(worth),
                ", over the l2 norm of its attention",
                "normalised per-layer",
            )
        default = "" if options.normalize else " (default)"
        ranking = replace(
            by_scores(scores, scores.picked(axes, worth), options, method, f"importance by {method}{by}"),
            note=f" over {scores.examples:,} examples, {normalised}{default}",
        )
    arguments = {
        "ratio": options.share,
        "removed": None,
        "metric": options.metric,
        "method": method,
        "normalize": normalize,
    }
    of = " of all attentions" if is_all else f" of {', '.join(options.attention)} attention"
    return plan(checkpoint, options, axes, budget, ranking, arguments, chosen=chosen, of=of)


def normalized(importance: Mapping[str, Array]) -> dict[str, Array]:
    """I_h / sqrt(sum_h' I_h'^2) within each layer (4.1), over all heads that were scored; zeros stay zeros.

    Heads that a checkpoint no longer holds count in the norm, so that pruning in steps by the scores of the original
    removes the same heads as pruning at once.
    """
    found = {}
    for name, values in importance.items():
        # Relative to the largest first: squares of small gradients would vanish, and equal layers stay equal.
        relative = values / (np.abs(values).max(initial=0.0) or 1.0)
        found[name] = relative / (sqrt(fsum(np.square(relative))) or 1.0)
    return found
