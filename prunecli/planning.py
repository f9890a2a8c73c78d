"""Plan how FFNs are shared, with the model run on text where FFNs get narrower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prunecli.errors import MemoryShortError
from prunecli.evaluation.on_text import describe, measured_text
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.sharing.plan import narrows, plan_ffn, rewrite_shared
from prunecli.methods.units import TextRun
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.pipeline import apply

if TYPE_CHECKING:
    from prunecli.methods.sharing.arrange import SharePlan
    from prunecli.results.unit_scores import Scores
    from prunecli.text.choice import Dataset


def plan_ffn_on_text(checkpoint: Checkpoint, options: FfnOptions, run: TextRun) -> SharePlan:
    """`plan_ffn`; an FFN that gets narrower keeps the hidden units of the merged FFNs that are most active on text.

    With `keep_units="norms"` no text is read.

    Args:
        checkpoint: the source.
        options: see `FfnOptions`; `text` is filled in.
        run: the text, and how the model runs on it.

    Raises:
        PruneError: as `plan_ffn`; text or a model that cannot be used.
    """
    if options.keep_units == "norms" or (options.keep_units is None and not narrows(checkpoint, options)):
        return plan_ffn(checkpoint, options)
    what, without = "`width` below that of the FFNs", "`keep_units=norms`"
    data = measured_text(checkpoint, run.choice, what, run.say, without=without)
    options = options.model_copy(update={"keep_units": "activations", "text": describe(data, run.choice)})
    return plan_ffn(checkpoint, options, lambda merging: _merged_activations(checkpoint, merging, data, run))


def _merged_activations(checkpoint: Checkpoint, merging: SharePlan, data: Dataset, run: TextRun) -> Scores:
    """Activations of the merged FFNs of a plan; their model is written to a temporary directory, if it is new."""
    from prunecli.methods.ffn.activations import measure_activations

    rewrite = rewrite_shared(checkpoint, merging)
    if rewrite.structure == checkpoint.structure and not any(group.is_merged for group in merging.groups):
        return measure_activations(checkpoint, data, run)
    with TemporaryDirectory(prefix="prunecli-") as folder:
        apply(checkpoint, rewrite, Path(folder) / "merged", progress=run.progress)
        with open_model(Path(folder) / "merged") as merged:
            try:
                return measure_activations(merged, data, run)
            except MemoryShortError as error:  # the remedy looks at a checkpoint that is still there
                error.shortage = replace(error.shortage, checkpoint=checkpoint.path)
                raise
