"""Losses of one example at a time, without batches, padding or a loss function of torch: logs of softmaxes."""

import math
from collections.abc import Sequence
from typing import Any

import torch


def nll(logits: Sequence[float], label: int) -> float:
    """-log softmax(logits)[label]."""
    largest = max(logits)
    return largest + math.log(sum(math.exp(value - largest) for value in logits)) - logits[label]


def logits_of(model: Any, **inputs: Any) -> Any:
    """The logits of one example given as lists of ids."""
    with torch.no_grad():
        tensors = {name: torch.tensor([value]) for name, value in inputs.items()}
        return model(**tensors).logits[0].tolist()


def translation_loss(model: Any, source: Sequence[int], target: Sequence[int]) -> float:
    """Mean over the target's tokens; the model's forward makes the decoder's inputs of the labels."""
    rows = logits_of(model, input_ids=source, labels=target)
    return sum(nll(row, token) for row, token in zip(rows, target, strict=True)) / len(target)


def causal_nll(model: Any, ids: Sequence[int], counted: int) -> float:
    """Sum over the last `counted` tokens, each predicted from all before it."""
    rows = logits_of(model, input_ids=ids)
    return sum(nll(rows[place - 1], ids[place]) for place in range(len(ids) - counted, len(ids)))


def masked_loss(model: Any, hidden: Sequence[int], labels: Sequence[int]) -> float:
    """Mean over the places whose label is not -100."""
    rows = logits_of(model, input_ids=hidden)
    losses = [nll(row, token) for row, token in zip(rows, labels, strict=True) if token != -100]
    return sum(losses) / len(losses)
