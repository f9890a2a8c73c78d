"""Gradient importance of a model whose layers stay on disk: all batches go through one layer after another, and back.

Examples, their batches and the order of all sums over them are those of `score`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prunecli.evaluation.layer_major import how, need_of
from prunecli.methods.heads.score import HeadSums, head_products, taken
from prunecli.model.attention import AttentionLayer
from prunecli.progress import Progress, silent
from prunecli.results.heads import Per
from prunecli.running.examples import Batch
from prunecli.running.layerwise.gradients import Gradients
from prunecli.running.layerwise.session import Group, Session
from prunecli.running.layerwise.swaps import frozen
from prunecli.running.losses import example_losses, require_finite


class GradientByLayer:
    """`score.gradient_importance` with the weights read as they are needed, twice each.

    Args:
        session: of the checkpoint; its skeleton is the model.
    """

    def __init__(self, session: Session) -> None:
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
        groups = self._session.groups([need_of(self._session, batch, backward=True) for _, batch in named])
        steps = 2 * len(named) * len(self._session.skeleton.stages)
        with (
            head_products(model, layers, per) as products,
            progress(f"scoring heads, {how(groups)}", steps, "batches x layers") as advance,
        ):
            for group in groups:
                self._through(model, group, [named[number] for number in group.numbers], advance)
        return {layer.name: taken(layer, products.get(layer.name)) for layer in layers}

    def _through(self, model: Any, group: Group, named: Sequence[tuple[str, Batch]], advance: Any) -> None:
        """One group, forwards and back."""

        def start(number: int, losses: Tensor) -> Tensor:
            text, batch = named[number]
            require_finite(losses.detach(), batch, text)
            return losses.sum()

        passes = [lambda batch=batch: example_losses(model, batch) for _, batch in named]
        with self._session.running(group) as machinery, torch.enable_grad(), frozen(model):
            gradients = Gradients(
                self._session.skeleton, machinery.reader, machinery.states, machinery.make_room
            )
            gradients.run(passes, start=start, after=lambda _stage, _number: advance(1))
