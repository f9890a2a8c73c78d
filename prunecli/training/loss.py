"""What is minimised: label-smoothed cross-entropy, and the distance to a teacher.

Over the N scored tokens of an update, with logits z of the model, z' of the teacher and p = softmax(z):

    L = 1/N sum_t [ (1 - w) CE_t + w T^2 KL_t + h MSE_t ]
    CE_t = -(1 - e) log p_t(y_t) - e/V sum_v log p_t(v)                       (label smoothing e)
    KL_t = sum_v q_t(v) (log q_t(v) - log s_t(v)), q = softmax(z'/T), s = softmax(z/T)
    MSE_t = mean over the width of the squared difference of the last hidden states

A mixture of experts adds a x its stock class's term for even use of all experts, where config.json asks for that
(`output_router_logits`; a is `router_aux_loss_coef`), in training alone.

The hidden states are those of the decoder, or of the only stack; an encoder's are compared too where there are both,
each over its own real tokens, scaled so that a token of the input weighs as much as one of the output. Models without a
head learn the last hidden states of a teacher alone, or the vectors of its texts (`prunecli.training.teacher`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prunecli.modules.logits import Logits
from prunecli.running.examples import IGNORED
from prunecli.text.tasks import TrainingTask
from prunecli.training.options import LossOptions


class Objective:
    """The loss of a batch, as a sum over its scored tokens.

    Args:
        options: weights.
        teacher: in evaluation mode, on the model's device; None: cross-entropy alone.
    """

    def __init__(self, options: LossOptions, teacher: Any = None) -> None:
        self.options, self.teacher = options, teacher
        self.in_blocks = (
            True  # False for sharded weights: the processes would differ in their numbers of blocks
        )

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum over the scored tokens of `batch` (see `Batch.with_labels`), differentiable, float32."""
        inputs: dict[str, Any] = {name: value for name, value in batch.items() if name != "labels"}
        labels, options = batch["labels"], self.options
        kept = labels != IGNORED
        targets = labels[kept]
        has_teacher = self.teacher is not None and (options.distill > 0 or options.hidden > 0)
        if has_teacher and options.hidden:
            inputs["output_hidden_states"] = True
        logits = Logits(model, inputs, kept, in_blocks=self.in_blocks)
        taught = None
        if has_teacher:
            with torch.no_grad():
                taught = Logits(self.teacher, inputs, kept)

        def loss(number: int, place: slice) -> Tensor:
            own, wanted = logits.block(number), targets[place]
            total = smoothed_cross_entropy(own, wanted, options.label_smoothing)
            if taught is None or not options.distill:
                return total
            with torch.no_grad():
                other = taught.block(number)
            divergence = distillation(own, other, options.temperature)
            return (1 - options.distill) * total + options.distill * divergence

        total = torch.stack(logits.each(loss)).sum()
        if taught is not None and options.hidden:
            total = total + options.hidden * hidden_distance(logits.outputs, taught.outputs, batch)
        if model.training and (balance := getattr(logits.outputs, "aux_loss", None)) is not None:
            config = getattr(model, "module", model).config.get_text_config()
            total = total + config.router_aux_loss_coef * kept.sum() * balance
        return total

    def figures(self, _loss: float) -> dict[str, float]:
        """What the mean loss of held-out text says beside itself."""
        return {}


def smoothed_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum of CE_t over the scored tokens.

    Args:
        logits: `[tokens, vocabulary]`.
        labels: `[tokens]`.
    """
    return functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")


def distillation(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Sum of T^2 KL_t over the scored tokens; both logits are `[tokens, vocabulary]`."""
    student = functional.log_softmax(logits.float() / temperature, -1)
    teacher = functional.log_softmax(taught.float() / temperature, -1)
    return temperature**2 * functional.kl_div(student, teacher, reduction="sum", log_target=True)


def hidden_distance(outputs: Any, taught: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum over the scored tokens of the mean squared difference of the last hidden states."""
    labels = batch["labels"]
    decoder = getattr(outputs, "decoder_hidden_states", None)
    if decoder is None:
        scored = labels != IGNORED if labels.dim() > 1 else batch["attention_mask"].bool()
        distance = _distance(outputs.hidden_states[-1], taught.hidden_states[-1], scored)
        return distance if labels.dim() > 1 else distance / scored.sum() * len(labels)
    scored, real = labels != IGNORED, batch["attention_mask"].bool()
    output = _distance(decoder[-1], taught.decoder_hidden_states[-1], scored)
    encoder = _distance(outputs.encoder_last_hidden_state, taught.encoder_last_hidden_state, real)
    return output + encoder / real.sum() * scored.sum()


def _distance(student: Tensor, teacher: Tensor, chosen: Tensor) -> Tensor:
    difference = (student.float() - teacher.float()).square().mean(dim=-1)
    return (difference * chosen).sum()


def headless_loss(options: LossOptions, task: TrainingTask) -> LossOptions:
    """The options that are left where there are no logits."""
    hidden = options.hidden or (1.0 if task == "feature-extraction" else 0.0)
    return replace(options, label_smoothing=0.0, distill=0.0, temperature=1.0, hidden=hidden)


class FeatureDistance(Objective):
    """Sum over the real tokens of the mean squared difference to the teacher's last hidden states, times its weight."""

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """See `Objective`."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        outputs = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            taught = self.teacher(**inputs, output_hidden_states=True)
        return self.options.hidden * hidden_distance(outputs, taught, batch)
