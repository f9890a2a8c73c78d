"""From a checkpoint, options and text to a plan, for the methods that run the model where their options ask for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prunecli.errors import MemoryShortError
from prunecli.evaluation.on_text import RunOptions, describe, measured_text
from prunecli.methods.ffn.narrow import NarrowOptions, plan_widths
from prunecli.methods.layers.plan import LayerOptions, plan_layers
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.sharing.plan import narrows, plan_ffn
from prunecli.methods.sharing.rewrite import rewrite_shared
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.pipeline import apply
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.tensors.documents import write_json
from prunecli.text.choice import TextChoice
from prunecli.text.plain import PlainText
from prunecli.text.tasks import training_task_of

if TYPE_CHECKING:
    from prunecli.methods.names import LayerMetric
    from prunecli.methods.sharing.arrange import SharePlan
    from prunecli.results.unit_scores import Scores
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
    save: ScoresFile | None = None,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Selection:
    """`plan_widths`; text is read, and the model run on it, where options ask for it.

    Args:
        save: takes what is measured.

    Other arguments, Raises: as `plan_ffn_on_text`.
    """
    if not options.needs_text:
        return plan_widths(checkpoint, options)
    from prunecli.methods.ffn.activations import measure_activations

    metric = options.metric or "activation-norm"
    other = "--metric norms (it can ruin a model)"
    data = measured_text(checkpoint, choice, f"--metric {metric}", say, without=other)

    def measure() -> Scores:
        scores = measure_activations(checkpoint, data, running or RunOptions(), progress, say, metric)
        return _of_text(scores, data, choice, save)

    return plan_widths(checkpoint, replace(options, text=describe(data, choice)), measure)


def plan_layers_on_text(
    checkpoint: Checkpoint,
    choice: TextChoice,
    options: LayerOptions,
    running: RunOptions | None = None,
    *,
    save: ScoresFile | None = None,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Selection:
    """`plan_layers`; text is read, and the model run on it, where options ask for it.

    Args, Raises: as `plan_widths_on_text`.
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

    def measure(metric: LayerMetric) -> Scores:
        scores = measure_layers(checkpoint, data, running or RunOptions(), metric, progress, say)
        return _of_text(scores, data, choice, save)

    return plan_layers(checkpoint, replace(options, text=describe(data, choice)), measure)


@dataclass(frozen=True)
class ScoresFile:
    """A file that takes what was measured.

    Attributes:
        path: of the file.
        force: whether an existing one is replaced.
    """

    path: Path
    force: bool = False


def _of_text(scores: Scores, data: Dataset, choice: TextChoice, save: ScoresFile | None) -> Scores:
    """The scores, with the text that they were measured on; written, if `save` names a file."""
    origin = {
        "task": data.task,
        "texts": list(choice.texts),
        "split": choice.split_read,
        "whole_files": data.text.whole_files if isinstance(data.text, PlainText) else None,
    }
    scores = scores.model_copy(update=origin)
    if save is not None:
        write_json(save.path, scores.to_json(), force=save.force)
    return scores


def _merged_activations(
    checkpoint: Checkpoint,
    merging: SharePlan,
    data: Dataset,
    running: RunOptions,
    progress: Progress,
    say: Say,
) -> Scores:
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
