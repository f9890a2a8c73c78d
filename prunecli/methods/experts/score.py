"""Measure: gate statistics of a mixture of experts (2212.09811, 4.1-4.2; 2510.13999, eq. 9), by any runner.

Every real token that a sparse layer routes is counted: no padding, no beams of finished sentences. Sums are added in
the order of the batches, whoever runs them: whether the model is held whole or a layer at a time, how many processes
share the batches, and how often a run was interrupted changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from typing import Any, Literal, Protocol

import torch

from prunecli.architectures.records import Side
from prunecli.choices import Choices
from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.observer import GateObserver, LayerSums, StockObserver
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.sparse_layer import SparseLayer
from prunecli.processes import ProcessGroup
from prunecli.progress import Progress, silent
from prunecli.results.gates import GateModel, GateStatistics, GateSums, Mode
from prunecli.results.header import header
from prunecli.running.layerwise.runner import Layerwise
from prunecli.running.runner import Advance, BatchCost, Run, Runner, ignored

Entry = tuple[str, ...]
"""What sums are kept of on the way: (source, "X"), whose sums are the encoder's; (source, target); (text,)."""


@dataclass(frozen=True)
class CollectOptions(Choices):
    """How statistics are collected.

    Attributes:
        mode: "forced" runs the decoder on the reference, "beam" searches. The paper's authors did the first for
            their 202 languages, the second for 30 and for 53. Language models have no such choice.
        beam: hypotheses per sentence, at least 2, in beam mode.
        batch_tokens: padded tokens in a batch (the beams come on top).
        context: of language models, tokens of a window; None: see `window_length`.
        max_tokens: of language models, tokens of each text at most; None: all.
        mean_outputs: of language models, whether sums of outputs go to a file beside the statistics.
    """

    mode: Literal["forced", "beam"] = "forced"
    beam: int = 4
    batch_tokens: int = 4096
    context: int | None = None
    max_tokens: int | None = None
    mean_outputs: bool = False


DEFAULT = CollectOptions()


@dataclass(frozen=True)
class State:
    """What a run has counted so far: a value that can be saved and continued.

    Attributes:
        batches: finished ones, in their order.
        sums: of each entry.
    """

    batches: int = 0
    sums: Mapping[Entry, GateSums] = field(default_factory=dict)


class Sums:
    """Sums by entry, to which those of passes are added, batch by batch.

    Args:
        before: of the batches before.
        empty: of an entry that has none yet.
        process_group: the processes that share the batches.
    """

    def __init__(
        self, before: Mapping[Entry, GateSums], empty: GateSums, process_group: ProcessGroup
    ) -> None:
        self.entries = dict(before)
        self._empty, self._process_group = empty, process_group

    def add(self, entries: Sequence[Sequence[Entry]], seen: list[LayerSums]) -> None:
        """Add what was seen of the passes of all processes.

        Args:
            entries: of each batch of this process, one for each of its passes.
            seen: of all its passes.
        """
        owners = [(number, entry) for number, batch in enumerate(entries) for entry in batch]
        mine: list[dict[Entry, LayerSums]] = [{} for _ in entries]
        for (number, entry), layers in zip(owners, seen, strict=True):
            mine[number][entry] = layers
        for batch in self._process_group.gather_shares(mine):
            for entry, layers in batch.items():
                if layers or entry not in self.entries:
                    self.entries[entry] = self.entries.get(entry, self._empty).plus(layers)

    def kept(self) -> list[Any]:
        """All of it, as `Run.forward` keeps things."""
        return [
            [*entry, [torch.from_numpy(getattr(sums, name)) for name in sums.names]]
            for entry, sums in self.entries.items()
        ]

    def restore(self, kept: list[Any]) -> None:
        """Go on from what `kept` gave."""
        self.entries = {
            tuple(entry): GateSums(*(array.numpy() for array in arrays)) for *entry, arrays in kept
        }


class Batch(Protocol):
    """Rows that are run together.

    Attributes:
        size: in units of the progress.
    """

    @property
    def size(self) -> int: ...

    def cost(self, runner: Layerwise) -> BatchCost:
        """What the batch takes layer by layer."""


@dataclass(frozen=True)
class Passes:
    """What is run, in which batches, and whose the sums of each pass are.

    Attributes:
        observer: sees what the passes do.
        entries: name of an entry of the statistics -> whose sums are added up for it.
        total: units of all batches, for the progress.
        unit: what it counts.
        batches: every batch, in an order that is a function of the material alone.
        steps: from batches to their passes through each stack.
        run: runs this process's batches of a group and adds up what is seen; `advance` is called with units that are
            done.
    """

    observer: GateObserver | StockObserver
    entries: Mapping[str, Sequence[Entry]]
    total: int
    unit: str
    batches: Iterator[Any]
    steps: Callable[[Sequence[Any]], Mapping[Side, int]]
    run: Callable[[Run, Sequence[Any], Sums, Advance], None]


class Material(Protocol):
    """Text, and how a model is run over it.

    Attributes:
        mode: of the statistics.
        key: everything that the sums depend on, beside the model and the type.
    """

    @property
    def mode(self) -> Mode: ...

    @property
    def key(self) -> dict[str, Any]: ...

    def whole(self, checkpoint: Checkpoint, /) -> UsageError | None:
        """Why the whole model must be in memory; None: it may be run layer by layer."""

    def layers(self, checkpoint: Checkpoint) -> tuple[SparseLayer, ...]:
        """The sparse layers that it runs.

        Raises:
            UnsupportedModelError: there are none.
        """

    def passes(self, runner: Runner, layers: Sequence[SparseLayer], tokenizer: Any) -> Passes:
        """How it goes through the runner's model."""


def score(
    runner: Runner,
    checkpoint: Checkpoint,
    tokenizer: Any,
    material: Material,
    *,
    state: State = State(),
    save: Callable[[State], None] = ignored,
    progress: Progress = silent,
) -> GateStatistics:
    """Run a model over text and sum what its routers do.

    Experts are numbered as in the original model; those that were pruned before hold zeros.

    Args:
        runner: of `checkpoint`; each of several processes has its own, calls this with the same state, and has the
            same result.
        state: of an interrupted run with the same arguments, by any runner, to go on from.
        save: called with the state after every group of batches.

    Raises:
        UnsupportedModelError: the model has no experts.
        DataError: text that the tokenizer cannot take.
        UsageError, CheckpointError, OutputError: as `runner` does.
        StatisticsError: the state was not whole.
        PruneError: another process has ended.
    """
    layers = material.layers(checkpoint)
    passes = material.passes(runner, layers, tokenizer)
    empty = GateSums.zeros(len(layers), layers[0].original_experts, passes.observer.names)
    share = runner.process_group.share
    # Layer by layer, a line for each group: how many batches go together is only known on the way.
    whole, each = (silent, progress) if runner.layerwise else (progress, silent)
    batches = passes.batches

    def size(several: Iterable[Batch]) -> int:
        return sum(batch.size for batch in several)

    with (
        whole("collecting gates", passes.total, passes.unit) as advance,
        passes.observer.watching(runner.model),
    ):
        advance(size(islice(batches, state.batches)))
        for group in runner.groups(batches, lambda layerwise, batch: batch.cost(layerwise), state.batches):
            mine = share(group.batches)
            sums = Sums(state.sums, empty, runner.process_group)
            with (
                each(
                    "collecting gates, layer by layer", runner.steps(passes.steps(mine)), "batches x layers"
                ) as step,
                runner.running(group, step) as run,
            ):
                passes.run(run, mine, sums, advance)
            # One assignment: an interrupt finds the state before these batches or after them, never between.
            state = State(state.batches + len(group.batches), sums.entries)
            save(state)
            advance(size(group.batches) - size(mine))
    entries = {}
    for name, parts in passes.entries.items():
        if not state.sums.keys() >= {*parts}:
            raise StatisticsError(
                f"the state of the interrupted run lacks {name}",
                "Remove the hidden file .OUTPUT.partial beside the output, and start again.",
            )
        entries[name] = reduce(GateSums.__add__, [state.sums[part] for part in parts])
    kind = GateStatistics.TEXT_FORMAT if material.mode == "text" else GateStatistics.FORMAT
    return GateStatistics(
        **header(kind, [checkpoint], None),
        model=GateModel(
            fingerprint=checkpoint.fingerprint,
            model_type=checkpoint.resolved.family.model_type,
            routers=checkpoint.router_fingerprint,
        ),
        mode=material.mode,
        layers=tuple(layer.name for layer in layers),
        num_experts=layers[0].original_experts,
        top_k=layers[0].top_k,
        entries=entries,
    )
