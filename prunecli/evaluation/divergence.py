"""How far a language model's next-token distributions are from another's, position by position.

The first model's distributions, vocabulary x tokens, are too many to be kept, and two models may not fit in memory
together. Its last hidden states, d_model x tokens, are few: these are kept, in the type that they are computed in, in
memory and then in a file, with the weights of its head alone. From both, its logits are computed again by the same
operations on the same blocks of positions, so that nothing is lost: a model does not diverge from itself, to the last
bit. A model whose head does not take last hidden states, each by itself, is kept whole and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from prunecli.errors import UsageError
from prunecli.modules.logits import BLOCK_VALUES, Logits
from prunecli.progress import Progress, silent
from prunecli.running.batches import run_forward
from prunecli.running.examples import IGNORED, Batch
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.losses import require_finite
from prunecli.running.runner import Runner

STATES = 256 << 20
"""Bytes of last hidden states that are held in memory; what is more goes to a file."""

LOGITS_BYTES = 2 * 4 * BLOCK_VALUES
"""Of a block of the first model's logits, and of both models' in float32."""

ROWS = 32
"""Positions whose divergence is computed at a time: what is held beside two blocks of logits is small."""


@dataclass(frozen=True)
class Compared:
    """What was measured of each example.

    Attributes:
        nats: `[examples]` float64: sum of -log q over its counted tokens.
        tokens: `[examples, spans]` int64: how many those are, by where they stand: in span n have 2^n to 2^(n + 1) - 1
            tokens of the window before them.
        divergence: `[examples, spans]` float64: sum over them of KL(p || q), in nats; 0 of p itself.
        agreed: `[examples]` int64: of how many of them p and q have the same most probable token; all of p itself.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]
    divergence: NDArray[np.float64]
    agreed: NDArray[np.int64]


class Reference:
    """The distributions p of a first model, which those of others, q, are compared with on the same batches.

    A context manager that gives back what it holds.

    Args:
        batches: of next-token examples (`window_examples`).
        spill_directory: for the hidden states that find no room in memory; None: the system's for temporary files.
    """

    def __init__(self, batches: Sequence[Batch], spill_directory: Path | None = None) -> None:
        self._batches, self._count = batches, sum(len(batch.indices) for batch in batches)
        self._longest = max(batch.labels.shape[1] for batch in batches)
        sizes = sum(batch.labels.numel() for batch in batches)
        # Four bytes of at most so many values a position: pages that are never used cost nothing.
        self._states = StateStore(min(STATES, sizes << 16), spill_directory)
        self._held: dict[tuple[int, ...], Stored] = {}
        self._head: Logits | None = None
        self._model: Any = None

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_error: object) -> None:
        self._states.close()
        self._head = self._model = None

    def record(self, runner: Runner, what: str, progress: Progress = silent) -> Compared:
        """Run the first model and keep what its distributions can be computed from again.

        Its weights are let go but for the head's: the model is good for nothing else afterwards.

        Raises:
            DataError: a loss is not finite.
            UsageError, CheckpointError, OutputError: as `runner` does.
        """
        found = _Sums(self._count, self._longest)

        def forward(batch: Batch) -> tuple[Tensor, Tensor, Logits]:
            mask = batch.labels != IGNORED
            targets, kept = batch.labels[mask].to(runner.device), mask.to(runner.device)
            logits = Logits(runner.model, batch.arguments(runner.model), kept, by_states=True)

            def block(number: int, place: slice) -> Tensor:
                return functional.cross_entropy(
                    logits.block(number).float(), targets[place], reduction="none"
                )

            return torch.cat(logits.each(block)), mask, logits

        def finish(batch: Batch, made: tuple[Tensor, Tensor, Logits]) -> int:
            losses, mask, logits = made
            agreed = torch.ones_like(losses)
            found.add(batch, mask, torch.stack([losses, torch.zeros_like(losses), agreed]))
            if logits.has_states:
                self._held[batch.indices] = self._states.put(logits.states)
            self._head = logits
            return int(batch.inputs["attention_mask"].sum())

        run_forward(runner, self._batches, forward, finish, (what, None, "tokens"), progress)
        assert self._head is not None
        if len(self._held) == len(self._batches):
            self._head.keep_head()
        else:
            self._model, self._head = runner.model, None
        return found.compared

    def compare(self, runner: Runner, what: str, progress: Progress = silent) -> Compared:
        """Run another model on the same batches: KL(p || q) = sum_v p(v) (log p(v) - log q(v)) of each position.

        Raises:
            UsageError: its vocabulary has another size; as `runner` does.
            DataError: a loss is not finite.
            CheckpointError, OutputError: as `runner` does.
        """
        found = _Sums(self._count, self._longest)

        def forward(batch: Batch) -> tuple[Tensor, Tensor]:
            mask = batch.labels != IGNORED
            targets, kept = batch.labels[mask].to(runner.device), mask.to(runner.device)
            logits = Logits(runner.model, batch.arguments(runner.model), kept, by_states=True)
            first = self._first(batch, kept)

            def block(number: int, place: slice) -> Tensor:
                return _differences(first(number, place), logits.block(number), targets[place])

            return torch.cat(logits.each(block), dim=1), mask

        def finish(batch: Batch, made: tuple[Tensor, Tensor]) -> int:
            values, mask = made
            found.add(batch, mask, values)
            return int(batch.inputs["attention_mask"].sum())

        beside = self._kept_bytes + LOGITS_BYTES
        run_forward(runner, self._batches, forward, finish, (what, None, "tokens"), progress, beside=beside)
        return found.compared

    @property
    def _kept_bytes(self) -> int:
        """Of the first model's weights that are left."""
        model = self._model if self._head is None else self._head.model
        return sum(weight.numel() * weight.element_size() for weight in model.parameters())

    def _first(self, batch: Batch, kept: Tensor) -> Callable[[int, slice], Tensor]:
        """The first model's logits of a block of a batch's positions."""
        if self._head is None:
            logits = Logits(self._model, batch.arguments(self._model), kept, by_states=True)
            return lambda number, _place: logits.block(number)
        head, states = self._head, self._states.get(self._held[batch.indices]).to(kept.device)
        return lambda _number, place: head.of_states(states[place])


class _Sums:
    """What is added up of each of so many examples, the longest of so many tokens."""

    def __init__(self, count: int, longest: int) -> None:
        self._nats, self._agreed = np.zeros(count), np.zeros(count, np.int64)
        # The label at place t has t + 1 tokens before it.
        self._spans = [slice((1 << n) - 1, (2 << n) - 1) for n in range(longest.bit_length())]
        self._divergence = np.zeros((count, len(self._spans)))
        self._tokens = np.zeros((count, len(self._spans)), np.int64)

    def add(self, batch: Batch, mask: Tensor, values: Tensor) -> None:
        """Of each of three measures `values` `[3, positions]`, of the positions in `mask` `[B, T]`."""
        here, where = list(batch.indices), mask.to(values.device)
        nats, divergence, agreed = (
            value.new_zeros(mask.shape).masked_scatter(where, value) for value in values
        )
        by_span = torch.stack([divergence[:, span].sum(dim=1) for span in self._spans], dim=1)
        for found in (nats.sum(dim=1), by_span.sum(dim=1)):
            require_finite(found, batch)
        self._nats[here] = nats.sum(dim=1).double().cpu().numpy()
        self._agreed[here] = agreed.sum(dim=1).double().cpu().numpy()
        self._divergence[here] = by_span.double().cpu().numpy()
        self._tokens[here] = torch.stack([mask[:, span].sum(dim=1) for span in self._spans], dim=1).numpy()

    @property
    def compared(self) -> Compared:
        return Compared(self._nats, self._tokens, self._divergence, self._agreed)


def _differences(first: Tensor, other: Tensor, targets: Tensor) -> Tensor:
    """`[3, positions]`: -log q of the target, KL(p || q), and whether both have the same most probable token.

    Args:
        first: `[positions, vocabulary]`: the logits of p.
        other: those of q.
        targets: `[positions]`.
    """
    if first.shape[-1] != other.shape[-1]:
        raise UsageError(
            f"a vocabulary of {other.shape[-1]:,} entries is compared with one of {first.shape[-1]:,}",
            "Compare models of one vocabulary.",
        )
    nats = functional.cross_entropy(other.float(), targets, reduction="none")
    agreed = first.argmax(dim=-1) == other.argmax(dim=-1)
    divergence = torch.cat(
        [
            _divergence(p.float().log_softmax(dim=-1), q.float().log_softmax(dim=-1))
            for p, q in zip(torch.split(first, ROWS), torch.split(other, ROWS), strict=True)
        ]
    )
    return torch.stack([nats, divergence, agreed.float()])


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL of two logarithms of probabilities `[positions, vocabulary]`; what p excludes adds nothing."""
    terms = (p - q).mul_(p.exp()).masked_fill_(p == -torch.inf, 0.0)
    return terms.sum(dim=-1).clamp_(min=0.0)  # rounding alone could make it less
