"""Divergence of a language model's next-token distributions from another's, position by position.

The first model's distributions, vocabulary x tokens, do not fit in memory, and two models may not either. Its last
hidden states, d_model x tokens, are small: they are stored in the type that they are computed in, in memory and then in
a file, with the weights of the head alone. From both, the first model's logits are computed again by the same
operations on the same blocks of positions: a model does not diverge from itself, to the last bit. If the head does
not take each last hidden state by itself, the whole model is kept and run again.
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
"""Bytes of last hidden states that are held in memory; the rest goes to a file."""

LOGITS_BYTES = 2 * 4 * BLOCK_VALUES
"""Bytes of a block of the first model's logits, and of both models' logits in float32."""

ROWS = 32
"""Positions whose divergence is computed at a time: little memory compared with two blocks of logits."""

LogitsOf = Callable[[int, slice], Tensor]
"""Number of a block and its place among the positions -> logits `[positions, vocabulary]`."""


@dataclass(frozen=True)
class Compared:
    """Sums over the counted tokens of each example.

    Attributes:
        nats: `[examples]` float64: sum of -log q.
        tokens: `[examples, spans]` int64: number of tokens in span n, which have 2^n to 2^(n + 1) - 1 tokens of the
            window before them.
        divergence: `[examples, spans]` float64: sum of KL(p || q), in nats; 0 for p.
        agreed: `[examples]` int64: number of tokens for which p and q have the same most probable token; all for p.
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]
    divergence: NDArray[np.float64]
    agreed: NDArray[np.int64]


@dataclass
class Reference:
    """The distributions p of a first model, which those of others, q, are compared with on the same batches.

    Attributes:
        batches: of next-token examples (`window_examples`).
        spill_directory: for hidden states that exceed `STATES`; None: the system's directory for temporary files.
    """

    batches: Sequence[Batch]
    spill_directory: Path | None = None

    def __post_init__(self) -> None:
        sizes = sum(batch.labels.numel() for batch in self.batches)
        # Four bytes for at most 2^14 values a position: pages that are never used take no memory.
        self._states = StateStore(min(STATES, sizes << 16), self.spill_directory)
        self._held: dict[tuple[int, ...], Stored] = {}
        self._head: Logits | None = None
        self._model: Any = None

    def close(self) -> None:
        """Free the stored states and weights."""
        self._states.close()
        self._head = self._model = None

    def measure(self, runner: Runner, what: str, progress: Progress = silent) -> Compared:
        """Run a model on the batches, and compare it with the first: sum_v p(v) (log p(v) - log q(v)) at each position.

        Of the first model the last hidden states and the head are stored; all other weights are freed.

        Raises:
            UsageError: its vocabulary has another size than the first model's; as `runner` does.
            DataError: a loss is not finite.
            CheckpointError, OutputError: as `runner` does.
        """
        model = self._model if self._head is None else self._head.model
        if model is not None:
            kept = sum(weight.numel() * weight.element_size() for weight in model.parameters())
            return self._run(runner, what, progress, self._first, kept + LOGITS_BYTES)
        found = self._run(runner, what, progress, None)
        assert self._head is not None
        if len(self._held) == len(self.batches):
            self._head.keep_head()
        else:
            self._model, self._head = runner.model, None
        return found

    def _run(
        self,
        runner: Runner,
        what: str,
        progress: Progress,
        first: Callable[[Batch, Tensor], LogitsOf] | None,
        beside: int = 0,
    ) -> Compared:
        """Sums of one model's values; with `first` compared with that model's logits, else its states are stored."""
        count = sum(len(batch.indices) for batch in self.batches)
        longest = max(batch.labels.shape[1] for batch in self.batches)
        # The label at place t has t + 1 tokens before it.
        spans = [slice((1 << n) - 1, (2 << n) - 1) for n in range(longest.bit_length())]
        found = Compared(
            np.zeros(count),
            np.zeros((count, len(spans)), np.int64),
            np.zeros((count, len(spans))),
            np.zeros(count, np.int64),
        )

        def forward(batch: Batch) -> tuple[Tensor, Tensor, Logits | None]:
            mask = batch.labels != IGNORED
            targets, kept = batch.labels[mask].to(runner.device), mask.to(runner.device)
            logits = Logits(runner.model, batch.arguments(runner.model), kept, by_states=True)
            reference = None if first is None else first(batch, kept)

            def block(number: int, place: slice) -> Tensor:
                p = None if reference is None else reference(number, place)
                return _values(p, logits.block(number), targets[place])

            return torch.cat(logits.each(block), dim=1), mask, logits if first is None else None

        def finish(batch: Batch, made: tuple[Tensor, Tensor, Logits | None]) -> int:
            values, mask, logits = made
            rows, where = list(batch.indices), mask.to(values.device)
            nats, divergence, agreed = (
                value.new_zeros(mask.shape).masked_scatter(where, value) for value in values
            )
            by_span = torch.stack([divergence[:, span].sum(dim=1) for span in spans], dim=1)
            for sums in (nats.sum(dim=1), by_span.sum(dim=1)):
                require_finite(sums, batch)
            found.nats[rows] = nats.sum(dim=1).double().cpu().numpy()
            found.tokens[rows] = torch.stack([mask[:, span].sum(dim=1) for span in spans], dim=1).numpy()
            found.divergence[rows] = by_span.double().cpu().numpy()
            found.agreed[rows] = agreed.sum(dim=1).double().cpu().numpy()
            if logits is not None:
                if logits.has_states:
                    self._held[batch.indices] = self._states.put(logits.states)
                self._head = logits
            return int(batch.inputs["attention_mask"].sum())

        run_forward(runner, self.batches, forward, finish, (what, None, "tokens"), progress, beside=beside)
        return found

    def _first(self, batch: Batch, kept: Tensor) -> LogitsOf:
        """The first model's logits at a batch's positions."""
        if self._head is None:
            logits = Logits(self._model, batch.arguments(self._model), kept, by_states=True)
            return lambda number, _place: logits.block(number)
        head, states = self._head, self._states.get(self._held[batch.indices]).to(kept.device)
        return lambda _number, place: head.of_states(states[place])


def _values(first: Tensor | None, other: Tensor, targets: Tensor) -> Tensor:
    """`[3, positions]`: -log q of the target, KL(p || q), and whether both have the same most probable token.

    Args:
        first: `[positions, vocabulary]`: the logits of p; None: p is q.
        other: the logits of q.
        targets: `[positions]`.
    """
    nats = functional.cross_entropy(other.float(), targets, reduction="none")
    if first is None:
        return torch.stack([nats, torch.zeros_like(nats), torch.ones_like(nats)])
    if first.shape[-1] != other.shape[-1]:
        raise UsageError(
            f"a vocabulary of {other.shape[-1]:,} entries is compared with one of {first.shape[-1]:,}",
            "Compare models of one vocabulary.",
        )
    divergence = []
    for rows in zip(torch.split(first, ROWS), torch.split(other, ROWS), strict=True):
        p, q = (logits.float().log_softmax(dim=-1) for logits in rows)
        terms = (p - q).mul_(p.exp()).masked_fill_(p == -torch.inf, 0.0)  # p excludes these tokens
        divergence.append(terms.sum(dim=-1).clamp_(min=0.0))  # rounding alone could make it negative
    agreed = first.argmax(dim=-1) == other.argmax(dim=-1)
    return torch.stack([nats, torch.cat(divergence), agreed.float()])
