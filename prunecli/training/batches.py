"""Batches of like lengths in a new random order each epoch, shared out to processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from prunecli.errors import DataError
from prunecli.running.examples import Examples
from prunecli.running.runner import ignored
from prunecli.text.batching import length_bucketed


class BucketSampler(Sampler[list[int]]):
    """The batches of one process: rows of examples of like lengths, of at most `batch_tokens` padded tokens.

    Sentences of equal lengths change places from epoch to epoch, and so do the batches. Both depend on the seed and
    the epoch alone, so that every process cuts the same batches and a resumed run sees those that are left. What does
    not divide among the processes waits for another epoch.

    Args:
        lengths: of the examples, as (input, output).
        batch_tokens: padded tokens of the longer side.
        seed: of the order.
        rank: number of this process.
        processes: how many there are.
        on_epoch: told of each epoch before its first batch.
    """

    def __init__(
        self,
        lengths: Sequence[tuple[int, int]],
        batch_tokens: int,
        seed: int,
        rank: int = 0,
        processes: int = 1,
        on_epoch: Callable[[int], None] = ignored,
    ) -> None:
        self.lengths, self.batch_tokens, self.seed = lengths, batch_tokens, seed
        self.rank, self.processes = rank, processes
        self.epoch, self.on_epoch = 0, on_epoch
        # The cut depends on the sorted lengths, so that every epoch has as many batches.
        self.count = len(length_bucketed(lengths, batch_tokens)) // processes

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Which order the next iteration has; the Trainer calls it."""
        self.epoch = epoch
        self.on_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.lengths)).tolist()
        batches = length_bucketed([self.lengths[row] for row in order], self.batch_tokens)
        shuffled = random.permutation(len(batches)).tolist()[: self.count * self.processes]
        for number in shuffled[self.rank :: self.processes]:
            yield [order[row] for row in batches[number]]


class EpochLoader(DataLoader[Any]):
    """A loader whose sampler is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


def loader(examples: Examples, sampler: BucketSampler, *, pin: bool = False) -> EpochLoader:
    """Batches of `examples` as the model takes them."""

    def collate(rows: list[int]) -> dict[str, Tensor]:
        return examples.batch(rows).with_labels

    rows: Any = range(len(examples.lengths))
    # A generator of its own: a loader draws from it at its start, which must not move that of dropout.
    generator = torch.Generator().manual_seed(sampler.seed)
    return EpochLoader(rows, batch_sampler=sampler, collate_fn=collate, generator=generator, pin_memory=pin)


def require_batch(examples: Examples, batch_tokens: int, batches: int) -> None:
    """Refuse text that does not fill one update.

    Args:
        batches: of an update, on all processes.

    Raises:
        DataError: there are fewer tokens than in that many batches.
    """
    tokens = sum(max(lengths) for lengths in examples.lengths)
    if tokens < batch_tokens * batches:
        of = f" x {batches} batches" if batches > 1 else ""
        raise DataError(
            f"the training text has {tokens:,} tokens, less than one update of {batch_tokens:,}{of}",
            "Give more text, or a smaller --batch-tokens.",
        )
