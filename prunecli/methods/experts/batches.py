"""The batches that gate statistics are collected from, and what one takes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prunecli.running.layerwise.budget import activation_bytes, state_bytes
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.runner import BatchCost
from prunecli.text.batching import length_bucketed
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import encode

Pair = tuple[str, str]
Ids = Sequence[int]
"""Token ids of a sentence; arrays, since a text in many languages is held as a whole."""


@dataclass(frozen=True)
class Batch:
    """Sentences of one source, to be decoded into every target; `targets[language][sentence]` are label ids."""

    source: str
    sources: Sequence[Ids]
    targets: Mapping[str, Sequence[Ids]]

    @property
    def sentences(self) -> int:
        """To be decoded: those of all targets."""
        return len(self.sources) * len(self.targets)


def batches_of(
    model: Any, tokenizer: Any, text: ParallelText, pairs: Sequence[Pair], batch_tokens: int
) -> Iterator[Batch]:
    """Every batch, in an order that is a function of the arguments."""
    config = model.config
    bounds = {"max_length": config.max_position_embeddings - 1, "vocabulary": config.vocab_size}
    rows: dict[str, list[Ids]] = {}  # as targets, in which languages are met again for each source

    def labels_of(language: str) -> list[Ids]:
        if language not in rows:
            found = encode(tokenizer, text.sentences[language], language, as_target=True, **bounds)
            rows[language] = [array("i", ids) for ids in found]
        return rows[language]

    for source in dict.fromkeys(pair[0] for pair in pairs):
        found = encode(tokenizer, text.sentences[source], source, **bounds)
        sources = [array("i", ids) for ids in found]
        labels = {target: labels_of(target) for name, target in pairs if name == source}
        lengths = [(len(ids), max(len(rows[i]) for rows in labels.values())) for i, ids in enumerate(sources)]
        for batch in length_bucketed(lengths, batch_tokens):
            yield Batch(
                source,
                [sources[i] for i in batch],
                {target: [rows[i] for i in batch] for target, rows in labels.items()},
            )


def batch_cost(runner: Layerwise, batch: Batch) -> BatchCost:
    """What a batch takes layer by layer: states while the encoder runs; beside its output, while the decoder does."""
    shape = runner.shape

    def states(rows: Sequence[Ids]) -> int:
        return state_bytes(shape, len(rows) * max(map(len, rows)), sum(map(len, rows)))

    keys = max(map(len, batch.sources))
    lengths = (keys, *(max(map(len, labels)) for labels in batch.targets.values()))
    output = len(batch.sources) * keys * shape.d_model * shape.itemsize
    return BatchCost(
        max(activation_bytes(shape, len(batch.sources), length, keys) for length in lengths),
        (states(batch.sources) + output, output + sum(map(states, batch.targets.values()))),
    )
