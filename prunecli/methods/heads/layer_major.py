"""Gradient importance of a model whose layers stay on disk: all batches go through one layer after another, and back.

Examples, their batches and the order of all sums over them are those of `score`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from prunecli.evaluation.layer_major import how, need_of
from prunecli.methods.heads.score import HeadSums, head_products, taken
from prunecli.model.attention import AttentionLayer
from prunecli.progress import Progress, silent
from prunecli.results.heads import Per
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.losses import example_losses, require_finite


class GradientByLayer:
    """`score.gradient_importance` with the weights read as they are needed, twice each.

    Args:
        session: of the checkpoint; its skeleton is the model.
    """

    def __init__(self, session: Layerwise) -> None:
        self._session = session

    def __call__(
        self,
        model: Any,
        layers: Sequence[AttentionLayer],
        batches: Mapping[str, Sequence[Batch]],
        progress: Progress = silent,
        *,
        per: Per = "example",
    ) -> HeadSums:
        """As `gradient_importance`; as many batches as find room go through the layers together.

        Raises:
            UsageError: too little memory.
            OutputError: no room for what is kept of the batches.
            CheckpointError: weights that cannot be read.
            DataError: an example's loss is not finite.
            PruneError: a gradient is not finite.
        """
        named = [(text, batch) for text, found in batches.items() for batch in found]
        groups = list(
            self._session.groups(named, lambda session, item: need_of(session, item[1], backward=True))
        )
        steps = 2 * len(named) * len(self._session.skeleton.stages)
        with (
            head_products(model, layers, per) as products,
            progress(f"scoring heads, {how(groups)}", steps, "batches x layers") as advance,
        ):
            for group in groups:

                def start(number: int, losses: Tensor, batches: Any = group.batches) -> Tensor:
                    text, batch = batches[number]
                    require_finite(losses.detach(), batch, text)
                    return losses.sum()

                with self._session.running(group, advance) as run:
                    run.backward([partial(example_losses, model, batch) for _, batch in group.batches], start)
        return {layer.name: taken(layer, products.get(layer.name)) for layer in layers}
