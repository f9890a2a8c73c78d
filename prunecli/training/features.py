"""Models without a head, sentence encoders among them, learn the last hidden states of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from prunecli.errors import DataError
from prunecli.evaluation.losses import IGNORED, encoded, padding_id, window_length
from prunecli.processes import ProcessGroup
from prunecli.text.batching import length_bucketed
from prunecli.training.examples import Sequences
from prunecli.training.loss import Objective, hidden_distance
from prunecli.training.options import LossOptions
from prunecli.training.validation import Validation

FEATURES: Literal["feature-extraction"] = "feature-extraction"


@dataclass(frozen=True)
class Features:
    """Texts whose hidden states are compared: every token is scored, and is its own label."""

    ids: Sequences
    pad_id: int

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """See `Examples`."""
        return [(length, length) for length in self.ids.lengths]

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """See `Examples`."""
        return {**self.ids.model_inputs(rows, self.pad_id), "labels": self.ids.rectangle(rows, IGNORED)}


def features(tokenizer: Any, model: Any, lines: Sequence[str], context: int | None = None) -> Features:
    """Texts as the tokenizer makes them, cut to `window_length`.

    Raises:
        UsageError: the model has fewer positions than `context`.
        DataError: there is no text.
    """
    cut = {"truncation": True, "max_length": window_length(model, tokenizer, context)}
    rows = [ids for ids in encoded(tokenizer, lines, **cut) if ids]
    if not rows:
        raise DataError("no text has a token", "Give other text.")
    return Features(Sequences(rows), padding_id(model, tokenizer))


def feature_loss(options: LossOptions) -> LossOptions:
    """The options that are left where there are no logits."""
    return replace(options, label_smoothing=0.0, distill=0.0, temperature=1.0, hidden=options.hidden or 1.0)


class FeatureDistance(Objective):
    """Sum over the real tokens of the mean squared difference to the teacher's last hidden states, times its weight."""

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """See `Objective`."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        outputs = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            taught = self.teacher(**inputs, output_hidden_states=True)
        return self.options.hidden * hidden_distance(outputs, taught, batch)


@dataclass(frozen=True)
class FeatureValidation(Validation):
    """Held-out text by the same measure; `loss` is its mean per token."""

    objective: FeatureDistance | None = None

    def _loss(self, model: Any, process_group: ProcessGroup) -> float:
        assert self.objective is not None
        total, count = 0.0, 0
        for rows in process_group.share(length_bucketed(self.examples.lengths, self.batch_tokens)):
            batch = {name: value.to(model.device) for name, value in self.examples.batch(rows).items()}
            count += int((batch["labels"] != IGNORED).sum())
            with torch.no_grad():
                total += float(self.objective(model, batch))
        distance, tokens = process_group.all_reduce([total, count])
        return distance / max(tokens, 1)
