"""How good the model is in the course of its training: the loss of held-out text, and chrF++ of its translations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prunecli.evaluation.decoding import DecodingOptions, translate
from prunecli.evaluation.scoring import make_metrics
from prunecli.processes import ProcessGroup
from prunecli.running.examples import IGNORED, Examples
from prunecli.text.batching import length_bucketed
from prunecli.text.parallel import ParallelText
from prunecli.training.loss import Objective


@dataclass(frozen=True)
class Translating:
    """What chrF++ is measured on: the directions `pairs` of `text`."""

    text: ParallelText
    pairs: Sequence[tuple[str, str]]
    tokenizer: Any
    options: DecodingOptions


@dataclass(frozen=True)
class Validation:
    """Held-out text.

    Attributes:
        batch_tokens: padded tokens in a batch.
        objective: what the loss is the mean of, over the scored tokens.
        translating: None where chrF++ is not measured.
    """

    examples: Examples
    batch_tokens: int
    objective: Objective
    translating: Translating | None = None

    def measure(self, model: Any, process_group: ProcessGroup) -> Mapping[str, float]:
        """`loss`: mean of the objective per scored token, in nats, and its `figures`; `chrf++`: mean over the pairs.

        The model is put into evaluation mode.
        """
        model.eval()
        total, count = 0.0, 0
        batches = length_bucketed(self.examples.lengths, self.batch_tokens)
        for first in range(0, len(batches), process_group.world_size):
            # Where weights are sharded, every process takes part in each forward pass: some run a batch for nothing.
            number = first + process_group.rank
            batch = self.examples.batch(batches[min(number, len(batches) - 1)])
            tensors = {name: value.to(model.device) for name, value in batch.with_labels.items()}
            with torch.no_grad():
                loss = float(self.objective(model, tensors))
            if number < len(batches):
                total += loss
                count += int((batch.labels != IGNORED).sum())
        total, tokens = process_group.all_reduce([total, count])
        loss = total / max(tokens, 1)
        scores = {"loss": loss, **self.objective.figures(loss)}
        if (task := self.translating) is not None:
            metric, found = make_metrics(None)["chrf++"], []
            for pair in task.pairs:
                sources, references = (task.text.sentences[name] for name in pair)
                made = translate(
                    model, task.tokenizer, sources, pair, task.options, process_group=process_group
                )
                texts = [translation.text for translation in made]
                found.append(float(metric.corpus_score(texts, [list(references)]).score))
            scores["chrf++"] = sum(found) / len(found)
        return scores
