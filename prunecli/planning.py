"""From a checkpoint, options and text to a plan, for the methods that run the model where their options ask for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prunecli.errors import MemoryShortError
from prunecli.evaluation.on_text import RunOptions, describe, measured_text
from prunecli.methods.ffn.narrow import MEASURED, NarrowOptions, plan_widths
from prunecli.methods.layers.plan import LayerOptions, plan_layers
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.sharing.plan import narrows, plan_ffn
from prunecli.methods.sharing.rewrite import rewrite_shared
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.pipeline import apply
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.text.choice import TextChoice
from prunecli.text.tasks import training_task_of

if TYPE_CHECKING:
    from prunecli.methods.ffn.score import UnitActivations
    from prunecli.methods.sharing.arrange import SharePlan
    from prunecli.selection.selection import Selection
    from prunecli.text.choice import Dataset
    from prunecli.text.tasks import TaskName


def plan_ffn_on_text(
    checkpoint: Checkpoint,
    choice: TextChoice,
    options: FfnOptions,
    running: RunOptions | None = None,
    *,
    progress: Progress = silent,
    say: Say = unsaid,
) -> SharePlan:
    """`plan_ffn`; where an FFN gets narrower, by the activations of the hidden units of the merged FFNs on text.

    With `keep_units="norms"` no text is read.

    Args:
        checkpoint: the source.
        choice: of the text: parallel for a model with encoder and decoder, plain for others.
        options: see there; `text` is filled in.
        running: how the model runs.
        progress, say: hear of it.

    Raises:
        PruneError: as `plan_ffn`; text or a model that cannot be used.
    """
    if options.keep_units == "norms" or (options.keep_units is None and not narrows(checkpoint, options)):
        return plan_ffn(checkpoint, options)
    data = measured_text(
        checkpoint, choice, "--width below that of the FFNs", say, without="--keep-units norms"
    )
    return plan_ffn(
        checkpoint,
        replace(options, keep_units="activations", text=describe(data, choice)),
        lambda merging: _merged_activations(
            checkpoint, merging, data, running or RunOptions(), progress, say
        ),
    )


def plan_widths_on_text(
    checkpoint: Checkpoint,
    choice: TextChoice,
    options: NarrowOptions,
    running: RunOptions | None = None,
    *,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Selection:
    """`plan_widths`; text is read, and the model run on it, where the score is one of `MEASURED`.

    Args, Raises: as `plan_ffn_on_text`.
    """
    if options.metric not in MEASURED:
        return plan_widths(checkpoint, options)
    from prunecli.methods.ffn.activations import measure_activations

    data = measured_text(
        checkpoint, choice, f"--metric {options.metric}", say, without="--metric norms (it can ruin a model)"
    )
    return plan_widths(
        checkpoint,
        replace(options, text=describe(data, choice)),
        lambda: measure_activations(checkpoint, data, running or RunOptions(), progress, say),
    )


def plan_layers_on_text(
    checkpoint: Checkpoint,
    choice: TextChoice,
    options: LayerOptions,
    running: RunOptions | None = None,
    *,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Selection:
    """`plan_layers`; text is read, and the model run on it, where the metric asks for it.

    Args, Raises: as `plan_ffn_on_text`.
    """
    if not options.needs_text:
        return plan_layers(checkpoint, options)
    is_encoder = training_task_of(checkpoint) == "feature-extraction"
    if options.metric is None and is_encoder and not options.contiguous:
        # By cosine MiniLM's Spearman on STS-B falls to 0.844 without half of its layers, less than at random (0.894).
        options = replace(options, metric="embedding")
    from prunecli.methods.layers.score import measure_layers

    metric = options.metric or "cosine"
    task: TaskName | None = "embedding" if metric == "embedding" else None
    other = "--metric last (it can ruin a model)"
    data = measured_text(checkpoint, choice, f"--metric {metric}", say, task=task, without=other)
    return plan_layers(
        checkpoint,
        replace(options, text=describe(data, choice)),
        lambda metric: measure_layers(checkpoint, data, running or RunOptions(), metric, progress, say),
    )


def _merged_activations(
    checkpoint: Checkpoint,
    merging: SharePlan,
    data: Dataset,
    running: RunOptions,
    progress: Progress,
    say: Say,
) -> UnitActivations:
    """Of the FFNs that a plan makes: where it changes any, its result is written to a temporary directory and run."""
    from prunecli.methods.ffn.activations import measure_activations

    rewrite = rewrite_shared(checkpoint, merging)
    if rewrite.structure == checkpoint.structure and not any(group.is_merged for group in merging.groups):
        return measure_activations(checkpoint, data, running, progress, say)
    with TemporaryDirectory(prefix="prunecli-") as folder:
        apply(checkpoint, rewrite, Path(folder) / "merged", progress=progress)
        with open_model(Path(folder) / "merged") as merged:
            try:
                return measure_activations(merged, data, running, progress, say)
            except MemoryShortError as error:  # the remedy looks at a checkpoint that is still there
                error.shortage = replace(error.shortage, checkpoint=checkpoint.path)
                raise
