"""What `bench-latency` times of models that read examples once: classes, hidden tokens, vectors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prunecli.errors import UsageError
from prunecli.evaluation.workload import Phase, Rows, Workload, finished_at
from prunecli.model.checkpoint import Checkpoint
from prunecli.text.choice import Dataset, columns
from prunecli.text.labelled import LabelledText
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self

    from prunecli.running.examples import Batch


@dataclass(frozen=True)
class Passes(Workload):
    """Examples that go through the model once.

    Attributes:
        types: `token_type_ids` of each example, or None.
    """

    decodes: ClassVar[bool] = False

    types: Rows | None = None

    def part(self, start: int, stop: int) -> Self:
        """See `Workload`."""
        types = None if self.types is None else self.types[start:stop]
        return replace(self, rows=self.rows[start:stop], types=types)

    @property
    def tokens(self) -> dict[Phase, int]:
        """See `Workload`."""
        return {None: sum(map(len, self.rows))}

    def run(self, model: Any, _beam: int) -> dict[Phase, float]:
        """See `Workload`."""
        import torch

        from prunecli.running.examples import Batch, Sequences

        every = range(len(self))
        inputs = Sequences(self.rows).inputs(every, self.pad_id)
        if self.types is not None:
            inputs["token_type_ids"] = Sequences(self.types).padded(every, 0)
        batch = Batch(inputs, torch.empty(0), tuple(every))
        forward = self._forward(model)
        finished_at(model)
        start = time.perf_counter()
        with torch.inference_mode():
            forward(batch)
        return {None: finished_at(model) - start}

    def _forward(self, model: Any) -> Callable[[Batch], Any]:
        return lambda batch: model(**batch.arguments(model))


@dataclass(frozen=True)
class Vectors(Passes):
    """Texts that vectors are made of.

    Attributes:
        directory: whose `modules.json` says how texts are pooled.
    """

    directory: str = ""

    def _forward(self, model: Any) -> Callable[[Batch], Any]:
        from prunecli.modules.pooling import read_pooling
        from prunecli.running.vectors import batch_vectors

        return partial(batch_vectors, model, read_pooling(Path(self.directory)))


def classified(checkpoint: Checkpoint, model: Any, tokenizer: Any, text: LabelledText) -> Passes:
    from prunecli.running.encoding import labelled_examples

    examples = labelled_examples(tokenizer, model, text)
    if examples.max_rows == 1 and len(text) > 1:
        raise UsageError(
            f"{checkpoint.path}: config.json names no padding token, so the model takes one example at a time",
            "Give --batch-size 1 and --sentences 1, or set pad_token_id in config.json.",
        )
    types = None if examples.types is None else examples.types.rows()
    return Passes(examples.ids.rows(), examples.pad_id, types)


def embedded(checkpoint: Checkpoint, data: Dataset, count: int) -> Vectors:
    from prunecli.modules.pooling import read_pooling
    from prunecli.running.encoding import embedding_examples

    texts = [one for column in columns(data.text.first(count), data.pairs).values() for one in column][:count]
    model, tokenizer = without_weights(checkpoint), load_tokenizer(checkpoint.path)
    examples = embedding_examples(tokenizer, model, read_pooling(checkpoint.path), texts, data.context)
    return Vectors(examples.ids.rows(), examples.pad_id, directory=str(checkpoint.path))


def masked(model: Any, tokenizer: Any, text: PlainText, context: int | None) -> Passes:
    from prunecli.running.encoding import require_task, text_examples

    require_task(model, "mlm")
    examples = text_examples(tokenizer, model, text.texts, context, skip_empty=False)
    return Passes(examples.ids.rows(), examples.pad_id)


def without_weights(checkpoint: Checkpoint) -> Any:
    """The model on the meta device, for what a task asks of its class; loaded where prunecli does not build it."""
    import torch

    from prunecli.modules.building import assemble
    from prunecli.modules.loading import load_model

    if checkpoint.runs_stock:
        return load_model(checkpoint.path, device="cpu")
    return assemble(checkpoint, torch.device("meta"), torch.float32)
