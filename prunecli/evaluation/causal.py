"""Causal language models one after another: perplexity, and what the others lost against the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.errors import DataError, UsageError
from prunecli.evaluation.continuations import Ids, agreement, choose_prompts, continue_greedily
from prunecli.evaluation.divergence import Compared, Reference
from prunecli.evaluation.language_model import TextLosses, bits_per, of_texts, perplexity, utf8_bytes
from prunecli.evaluation.measured import Measured
from prunecli.evaluation.options import EvaluationOptions
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.encoding import filling
from prunecli.running.examples import Batch
from prunecli.running.lengths import window_length
from prunecli.running.losses import measure_losses
from prunecli.running.runner import Runner
from prunecli.running.windows import Window, lm_windows, window_examples
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer

if TYPE_CHECKING:
    from prunecli.results.evaluation import Example


class CausalModels:
    """Measures causal language models one after another; the first is what the others are compared with.

    A context manager that gives back what is kept of the first.

    Args:
        checkpoints: label -> directory, of all that will be measured, in this order.
        context: tokens of a window; None: see `window_length`.
        say: hears which of them cannot be compared with the first, and why.

    Raises:
        UsageError: continuations are asked for and there is nothing to compare, or not by them.
        CheckpointError: no tokenizer.
    """

    def __init__(
        self,
        checkpoints: Mapping[str, Path],
        text: PlainText,
        context: int | None,
        options: EvaluationOptions,
        say: Say = unsaid,
    ) -> None:
        self._text, self._context, self._options, self._say = text, context, options, say
        self._first, *others = checkpoints
        if options.continuations and not others:
            raise UsageError(
                "`continuations` compares checkpoints, one was given", "Name the one to compare with first."
            )
        self._compared = bool(others)
        self._others_own = _other_vocabularies(checkpoints) if others else {}
        for label, reason in self._others_own.items():
            self._refuse(label, reason)
        self._windows: list[Window] = []
        self._reference: Reference | None = None
        self._prompts: dict[str, list[str]] = {}
        self._continued: dict[str, dict[str, list[tuple[list[int], str]]]] = {}

    def __enter__(self) -> CausalModels:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._reference is not None:
            self._reference.__exit__()

    def measure(self, label: str, runner: Runner, tokenizer: Any, progress: Progress = silent) -> Measured:
        """Scores of one of the checkpoints; the first comes first, and its model is good for nothing afterwards.

        Raises:
            PruneError: as `lm_windows` and `runner`; a loss that is not finite.
        """
        options = self._options
        length = window_length(runner.model, tokenizer, self._context)
        cut = {"context": length, "stride": length - 1 if options.stride is None else options.stride}
        windows = lm_windows(tokenizer, runner.model, self._text.texts, **cut)
        is_first, is_compared = label == self._first, self._compared and label not in self._others_own
        if is_first:
            self._windows = windows
        elif is_compared and windows != self._windows:
            self._refuse(label, "it reads the texts in other windows (the same `context` makes them alike)")
            is_compared = False
        continued = self._continue(label, runner, tokenizer, windows, progress) if is_compared else {}
        batches = window_examples(windows, *filling(runner.model, tokenizer)).batches(
            options.decoding.batch_tokens
        )
        read = self._read(runner, batches, len(windows), is_compared, f"{label}: reading", progress)
        added = partial(of_texts, windows=windows, count=len(self._text))
        texts = Compared(added(read.nats), added(read.tokens), added(read.divergence), added(read.agreed))
        shown = is_compared and not is_first
        names: dict[str | None, list[int]] = {None: [*range(len(self._text))]}
        names.update(self._text.by_name)
        scores = {
            name: self._scores(texts, rows, name, compared=shown) | continued.get(name, {})
            for name, rows in names.items()
        }
        if (
            self._text.whole_files
        ):  # of few documents; other windows than the first's cannot be tested against them
            own_windows = is_first or windows == self._windows
            values = read.nats / read.tokens.sum(axis=1) if own_windows else np.zeros(0)
        else:
            values = texts.nats / np.log(2) / np.array([utf8_bytes(one) for one in self._text.texts])
        return Measured(
            scores.pop(None),
            values,
            cut,
            {name: own for name, own in scores.items() if name is not None},
        )

    def _read(
        self,
        runner: Runner,
        batches: Sequence[Batch],
        count: int,
        is_compared: bool,
        what: str,
        progress: Progress,
    ) -> Compared:
        if not is_compared:
            nats, tokens = measure_losses(runner, batches, count, what, progress)
            return Compared(nats, tokens[:, None], np.zeros((count, 1)), np.zeros(count, np.int64))
        if self._reference is not None:
            return self._reference.compare(runner, what, progress)
        self._reference = Reference(batches, self._options.spill_directory)
        return self._reference.record(runner, what, progress)

    def _scores(
        self, found: Compared, rows: Sequence[int], name: str | None, *, compared: bool
    ) -> dict[str, Any]:
        """Of some of the texts."""
        texts = [self._text.texts[row] for row in rows]
        losses = TextLosses(found.nats[rows], found.tokens[rows].sum(axis=1))
        tokens = int(losses.tokens.sum())
        if not tokens:
            raise DataError(f"{name}: the text has no token to predict", "Leave it out, or give longer text.")
        scores: dict[str, Any] = {
            "perplexity": perplexity(losses.loss),
            "loss": losses.loss,
            "bits_per_byte": bits_per(losses, texts, utf8_bytes),
            "bits_per_character": bits_per(losses, texts, len),
            "tokens": tokens,
        }
        if compared:
            scores["kl_divergence"] = float(found.divergence[rows].sum() / tokens)
            scores["top1_agreement"] = float(found.agreed[rows].sum() / tokens)
            # Mean divergence by how many tokens of the window come before (2510.13999, Figure 4c).
            spans = zip(found.tokens[rows].sum(axis=0), found.divergence[rows].sum(axis=0), strict=True)
            scores["by_position"] = [
                {
                    "first": 1 << n,
                    "last": (2 << n) - 1,
                    "tokens": int(count),
                    "kl_divergence": round(nats / count, 6),
                }
                for n, (count, nats) in enumerate(spans)
                if count
            ]
        return scores

    def _continue(
        self, label: str, runner: Runner, tokenizer: Any, windows: Sequence[Window], progress: Progress
    ) -> dict[str | None, dict[str, Any]]:
        """Name of texts (None: all) -> how the continuations go along with the first model's; empty for that one."""
        count = self._options.continuations
        if not count:
            return {}
        prompts: dict[str, list[Ids]] = {}
        for name, rows in (self._text.by_name or {"": [*range(len(self._text))]}).items():
            chosen = set(rows)
            prompts[name] = choose_prompts([window.ids for window in windows if window.text in chosen], count)
        with progress(f"{label}: continuing", sum(map(len, prompts.values())), "prompts") as advance:
            made = {
                name: continue_greedily(
                    runner.model,
                    tokenizer,
                    of_name,
                    self._options.decoding.batch_tokens,
                    self._options.decoding.max_new_tokens,
                    advance,
                )
                for name, of_name in prompts.items()
            }
        decode = tokenizer.batch_decode
        self._continued[label] = {name: [*zip(own, decode(own), strict=True)] for name, own in made.items()}
        if label == self._first:
            self._prompts = {name: decode(of_name) for name, of_name in prompts.items()}
            return {}
        first = self._continued[self._first]
        both: dict[str | None, Any] = {
            name: ([ids for ids, _ in first[name]], own) for name, own in made.items()
        }
        both[None] = tuple([*chain(*side)] for side in zip(*both.values(), strict=True))
        return {of_name: asdict(agreement(*pair)) for of_name, pair in both.items()}

    def examples(self) -> list[Example]:
        """The prompts whose continuations differ most from those of the first model; empty without continuations."""
        from prunecli.results.evaluation import Example

        found = []
        for name, prompts in self._prompts.items():
            for row, prompt in enumerate(prompts):
                own = {label: continued[name][row] for label, continued in self._continued.items()}
                (first, _), *others = own.values()
                alike = sum(agreement([first], [ids]).equal_tokens for ids, _ in others)
                outputs = {label: text for label, (_, text) in own.items()}
                found.append((alike, Example(text=name or None, source=prompt, outputs=outputs)))
        return [example for _, example in sorted(found, key=lambda one: one[0])[: self._options.examples]]

    def _refuse(self, label: str, reason: str) -> None:
        """Say that this model is not compared with the first; refuse it where that was asked for by an option."""
        line = f"{label}: no comparison of next tokens with {self._first}: {reason}"
        if self._options.continuations:
            raise UsageError(line, "Leave `continuations` out, or compare models of one tokenizer.")
        self._say(f"{line}.")


def _other_vocabularies(checkpoints: Mapping[str, Path]) -> dict[str, str]:
    """Label of each checkpoint whose tokens are not the first one's -> what is different."""
    first, *others = ((label, load_tokenizer(path).get_vocab()) for label, path in checkpoints.items())
    return {label: "its tokenizer has other tokens" for label, tokens in others if tokens != first[1]}
