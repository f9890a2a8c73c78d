"""`score-heads --memory`: the gradient method on a model whose layers stay on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prunecli.commands.memory_options import report_run

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.heads import HeadScores, Per
    from prunecli.running.layerwise.runner import Resources
    from prunecli.text.choice import Dataset


def score_by_layer(
    checkpoint: Checkpoint,
    tokenizer: Any,
    reported: Dataset,
    batch_tokens: int,
    means: Resources,
    progress: Any,
    per: Per,
) -> HeadScores:
    """The gradient method, holding a layer at a time.

    Raises:
        PruneError: text, model, memory or losses that cannot be used.
    """
    from prunecli.methods.heads.layer_major import GradientByLayer
    from prunecli.methods.heads.measure import Subject, score_by_gradient
    from prunecli.running.layerwise.runner import Layerwise, RunReport

    work = RunReport()
    session = Layerwise(checkpoint, means, work)
    subject = Subject(checkpoint, session.skeleton.model, tokenizer)
    by_layer = GradientByLayer(session)
    scores = score_by_gradient(subject, reported, batch_tokens, progress, per=per, importance=by_layer)
    report_run(work, back=True)
    return scores
