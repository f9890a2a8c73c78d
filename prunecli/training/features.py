"""Models without a head, sentence encoders among them, learn the last hidden states of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from prunecli.training.loss import Objective, hidden_distance
from prunecli.training.options import LossOptions

FEATURES: Literal["feature-extraction"] = "feature-extraction"


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
