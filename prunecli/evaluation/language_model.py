"""`evaluate --task lm`: perplexity, bits per byte, divergence from the first model, and greedy continuations.

The first model's next-token distributions, vocabulary x tokens, do not fit in memory, and two models may not either.
Its last hidden states, d_model x tokens, are small: they are stored in the type that they are computed in, in memory
and then in a file, with the weights of the head alone. From both, the first model's logits are computed again by the
same operations on the same blocks of positions: a model does not diverge from itself, to the last bit. If the head does
not take each last hidden state by itself, the whole model is kept and run again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional

from prunecli.errors import DataError, UsageError
from prunecli.evaluation.decoding import end_ids, generate
from prunecli.evaluation.tasks import T_TEST, Measured, ModelTask, perplexity
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.cost import head_bytes
from prunecli.modules.logits import BLOCK_VALUES, Logits
from prunecli.progress import Progress, silent
from prunecli.results.document import Json
from prunecli.running.batches import measure_losses, require_finite, run_forward
from prunecli.running.encoding import (
    Window,
    filling,
    lm_windows,
    padding_id,
    position_count,
    window_examples,
    window_length,
)
from prunecli.running.examples import IGNORED, Batch
from prunecli.running.layerwise.runner import Runner
from prunecli.running.layerwise.states import StateStore, Stored
from prunecli.running.runner import Advance, ignored
from prunecli.tensors.dtypes import parse_dtype
from prunecli.text.batching import length_bucketed
from prunecli.text.plain import PlainText
from prunecli.text.tokens import Tokenizer, load_tokenizer

STATES = 256 << 20
"""Bytes of last hidden states that are held in memory; the rest goes to a file."""

LOGITS_BYTES = 2 * 4 * BLOCK_VALUES
"""Bytes of a block of the first model's logits, and of both models' logits in float32."""

ROWS = 32
"""Positions whose divergence is computed at a time: little memory compared with two blocks of logits."""


@dataclass
class Reference:
    """The distributions p of a first model, which those of others, q, are compared with on the same batches.

    Attributes:
        batches: of next-token examples (`window_examples`).
        spill_directory: for hidden states that exceed `STATES`; None: the system's directory for temporary files.
    """

    batches: Sequence[Batch]
    spill_directory: Path | None = None

    def __post_init__(self) -> None:
        sizes = sum(batch.labels.numel() for batch in self.batches)
        # Four bytes for at most 2^14 values a position: pages that are never used take no memory.
        self._states = StateStore(min(STATES, sizes << 16), self.spill_directory)
        self._held: dict[tuple[int, ...], Stored] = {}
        self._head: Logits | None = None
        self._model: Any = None

    def close(self) -> None:
        """Free the stored states and weights."""
        self._states.close()
        self._head = self._model = None

    def measure(self, runner: Runner, what: str, progress: Progress = silent) -> pd.DataFrame:
        """Run a model on the batches, and compare it with the first: sum_v p(v) (log p(v) - log q(v)) at each position.

        Of the first model the last hidden states and the head are stored; all other weights are freed.

        Returns:
            A row for each `example`: sums over the counted tokens. `nats`: -log q; `divergence`: KL(p || q) in nats, 0
            for p; `agreed`: how often p and q have the same most probable token; `tokens`: their number.

        Raises:
            UsageError: its vocabulary has another size than the first model's; as `runner` does.
            DataError: a loss is not finite.
            CheckpointError, OutputError: as `runner` does.
        """
        model, beside = self._model if self._head is None else self._head.model, 0
        is_first = model is None
        if not is_first:
            beside = LOGITS_BYTES + sum(weight.nbytes for weight in model.parameters())
        found = []

        def forward(batch: Batch) -> tuple[Tensor, Tensor, Logits | None]:
            mask = batch.labels != IGNORED
            targets, kept = batch.labels[mask].to(runner.device), mask.to(runner.device)
            logits = Logits(runner.model, batch.arguments(runner.model), kept, by_states=True)
            if self._model is not None:
                whole = Logits(self._model, batch.arguments(self._model), kept, by_states=True)
            elif not is_first:
                states = self._states.get(self._held[batch.indices]).to(kept.device)

            def block(number: int, place: slice) -> Tensor:
                p = None
                if self._model is not None:
                    p = whole.block(number)
                elif self._head is not None and not is_first:
                    p = self._head.of_states(states[place])
                return _values(p, logits.block(number), targets[place])

            return torch.cat(logits.each(block), dim=1), mask, logits if is_first else None

        def finish(batch: Batch, made: tuple[Tensor, Tensor, Logits | None]) -> int:
            values, mask, logits = made
            examples = np.array(batch.indices)[mask.numpy().nonzero()[0]]
            require_finite(values[:2].sum(dim=0), replace(batch, indices=tuple(examples)))
            keys = {"example": examples, "tokens": 1}
            sums = dict(zip(("nats", "divergence", "agreed"), values.double().cpu().numpy(), strict=True))
            found.append(pd.DataFrame(keys | sums).groupby("example", as_index=False).sum())
            if logits is not None:
                if logits.has_states:
                    self._held[batch.indices] = self._states.put(logits.states)
                self._head = logits
            return batch.tokens

        line = what, sum(batch.tokens for batch in self.batches), "tokens"
        run_forward(runner, self.batches, forward, finish, line, progress, beside=beside)
        if is_first and len(self._held) < len(self.batches):
            self._model, self._head = runner.model, None
        elif is_first and self._head is not None:
            self._head.keep_head()
        return pd.concat(found)


def _values(first: Tensor | None, other: Tensor, targets: Tensor) -> Tensor:
    """`[3, positions]`: -log q of the target, KL(p || q), and whether both have the same most probable token.

    Args:
        first: `[positions, vocabulary]`: the logits of p; None: p is q.
        other: the logits of q.
        targets: `[positions]`.
    """
    nats = functional.cross_entropy(other.float(), targets, reduction="none")
    if first is None:
        return torch.stack([nats, torch.zeros_like(nats), torch.ones_like(nats)])
    if first.shape[-1] != other.shape[-1]:
        raise UsageError(
            f"a vocabulary of {other.shape[-1]:,} entries is compared with one of {first.shape[-1]:,}",
            "Compare models of one vocabulary.",
        )
    divergence = []
    for rows in zip(torch.split(first, ROWS), torch.split(other, ROWS), strict=True):
        p, q = (logits.float().log_softmax(dim=-1) for logits in rows)
        terms = (p - q).mul_(p.exp()).masked_fill_(p == -torch.inf, 0.0)  # p excludes these tokens
        divergence.append(terms.sum(dim=-1).clamp_(min=0.0))  # rounding alone could make it negative
    agreed = first.argmax(dim=-1) == other.argmax(dim=-1)
    return torch.stack([nats, torch.cat(divergence), agreed.float()])


PROMPT = 32
"""Tokens of a prompt, halved until a prompt is at most half of its text: few lengths, so that many run together."""
NEW_TOKENS = 64
"""Default limit on the tokens of a continuation."""
Ids = Sequence[int]


class CausalLanguageModel(ModelTask):
    """Measures causal language models; compares the next-token distributions of all with those of the first.

    The paired t-test is over the texts' bits per byte, or over the windows' losses if files are whole documents.
    """

    by_layer = "--memory"

    def prepare(self) -> None:
        """Find the models that can be compared with the first.

        Raises:
            UsageError: continuations are asked for, and a model cannot be compared.
            CheckpointError: no tokenizer.
        """
        text = self.data.text
        assert isinstance(text, PlainText)
        self.text = text
        self.test = (T_TEST, "bits_per_byte")
        if text.whole_files:
            self.test = (f"{T_TEST} over the windows' losses", "perplexity")
        self.first, *others = self.opened
        if self.options.continuations and not others:
            raise UsageError(
                "`continuations` compares checkpoints, one was given", "Name the one to compare with first."
            )
        self.comparable = {self.first} if others else set()
        self.tokenizer = load_tokenizer(self.opened[self.first].path)
        tokens = self.tokenizer.get_vocab()
        for label in others:
            if load_tokenizer(self.opened[label].path).get_vocab() == tokens:
                self.comparable.add(label)
            else:
                self._say_not_compared(label, "its tokenizer has other tokens")
        self.reference: Reference | None = None
        self.windows: list[Window] = []
        self.prompts: list[tuple[str, Ids]] = []
        self.continued: dict[str, list[list[int]]] = {}

    def kept_bytes(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Mapping[str, int]:
        """The first model's head, which is kept for the others (see `Reference`)."""
        first = self.opened[self.first]
        if checkpoint is first or not (size := head_bytes(first, parse_dtype(str(dtype)))):
            return {}
        return {"head of the first model": size}

    def close(self) -> None:
        """See `Task`."""
        if self.reference is not None:
            self.reference.close()

    def run(self, label: str, runner: Runner, tokenizer: Tokenizer) -> Measured:
        """See `ModelTask`. The first model cannot be used afterwards."""
        options, texts, model = self.options, self.text.texts, runner.model
        length = window_length(model, tokenizer, self.data.context)
        cut = {"context": length, "stride": length - 1 if options.stride is None else options.stride}
        windows = lm_windows(tokenizer, model, texts, **cut)
        if label == self.first:
            self.windows = windows
        elif label in self.comparable and windows != self.windows:
            self.comparable.remove(label)
            self._say_not_compared(
                label, "it reads the texts in other windows (the same `context` makes them alike)"
            )
        is_compared = label in self.comparable
        continued = (
            self._continue(label, model, tokenizer, windows) if is_compared and options.continuations else {}
        )
        batches = window_examples(windows, *filling(model, tokenizer)).batches(options.batch_tokens)
        what = f"{label}: reading"
        if is_compared:
            self.reference = self.reference or Reference(batches, options.spill_directory)
            read = self.reference.measure(runner, what, self.progress)
        else:
            nats, tokens = measure_losses(runner, batches, len(windows), what, self.progress)
            read = pd.DataFrame({"nats": nats, "tokens": tokens}).rename_axis("example").reset_index()
        read["text"] = [windows[number].text for number in read["example"]]
        shown = is_compared and label != self.first
        scores = {
            name: self._scores(read[read["text"].isin(rows)], name, compared=shown) | continued.get(name, {})
            for name, rows in {"": range(len(texts)), **self.text.by_name}.items()
        }
        values = np.zeros(0)
        if not self.text.whole_files:
            nats = read.groupby("text")["nats"].sum().reindex(range(len(texts)), fill_value=0.0)
            values = nats.to_numpy() / np.log(2) / [len(text.encode()) for text in texts]
        elif windows == self.windows:  # other windows cannot be tested against the first model's
            read = read.sort_values("example")
            values = (read["nats"] / read["tokens"]).to_numpy()
        return Measured(scores.pop(""), values, cut, scores)

    def _scores(self, found: pd.DataFrame, name: str, *, compared: bool) -> Json:
        """Scores of some of the texts."""
        found = found[found["tokens"] > 0]
        tokens, nats = int(found["tokens"].sum()), float(found["nats"].sum())
        texts = [self.text.texts[number] for number in found["text"].unique()]
        if not tokens:
            whose = f"{name}: " if name else ""
            raise DataError(f"{whose}the text has no token to predict", "Leave it out, or give longer text.")
        scores: Json = {
            "perplexity": perplexity(nats / tokens),
            "loss": nats / tokens,
            "bits_per_byte": nats / (math.log(2) * sum(len(text.encode()) for text in texts)),
            "bits_per_character": nats / (math.log(2) * sum(map(len, texts))),
            "tokens": tokens,
        }
        if compared:
            scores["kl_divergence"] = float(found["divergence"].sum() / tokens)
            scores["top1_agreement"] = float(found["agreed"].sum() / tokens)
        return scores

    def _continue(
        self, label: str, model: Any, tokenizer: Any, windows: Sequence[Window]
    ) -> dict[str, dict[str, float]]:
        """Continue prompts of each name of texts; return name ("": all texts) -> agreement with the first model."""
        options, self.prompts = self.options.decoding, []
        for name, rows in (self.text.by_name or {"": [*range(len(self.text))]}).items():
            chosen = set(rows)
            texts = [window.ids for window in windows if window.text in chosen]
            self.prompts += [(name, ids) for ids in choose_prompts(texts, self.options.continuations)]
        names, prompts = zip(*self.prompts, strict=True)
        with self.progress(f"{label}: continuing", len(prompts), "prompts") as advance:
            self.continued[label] = continue_greedily(
                model, tokenizer, prompts, options.batch_tokens, options.max_new_tokens, advance
            )
        if label == self.first:
            return {}
        found = {}
        for name in {"", *names}:
            both = (self.continued[one] for one in (self.first, label))
            own = ([row for of, row in zip(names, rows, strict=True) if name in ("", of)] for rows in both)
            found[name] = agreement(*own)
        return found

    def fields(self) -> Json:
        """See `Task`; with the prompts whose continuations differ most from the first model's."""
        found: list[tuple[float, Json]] = []
        decode = self.tokenizer.decode  # of one vocabulary: it reads the tokens of all
        for row, (name, prompt) in enumerate(self.prompts):
            made = {label: rows[row] for label, rows in self.continued.items()}
            first, *others = made.values()
            if others and all(other == first for other in others):
                continue
            alike = sum(agreement([first], [other])["equal_tokens"] for other in others)
            outputs = {label: decode(ids) for label, ids in made.items()}
            found.append((alike, {"text": name or None, "source": decode(prompt), "outputs": outputs}))
        examples = [one for _, one in sorted(found, key=lambda one: one[0])]
        return {**super().fields(), "examples": examples[: self.options.examples]}

    def _say_not_compared(self, label: str, reason: str) -> None:
        """Say that a model is not compared with the first; refuse it if an option asks for the comparison."""
        line = f"{label}: no comparison of next tokens with {self.first}: {reason}"
        if self.options.continuations:
            raise UsageError(line, "Leave `continuations` out, or compare models of one tokenizer.")
        self.say(f"{line}.")


def choose_prompts(texts: Sequence[Ids], count: int) -> list[Ids]:
    """The beginnings of `count` of the texts, spread evenly over them, or of all if there are fewer.

    Raises:
        DataError: no text has two tokens.
    """
    texts = [ids for ids in texts if len(ids) > 1]
    if not texts:
        raise DataError("no text has two tokens, of which one is a prompt", "Give longer text.")
    number = min(count, len(texts))
    chosen = [texts[index * len(texts) // number] for index in range(number)]
    # The largest power of two that is at most half of the text.
    return [ids[: min(PROMPT, 1 << (len(ids) // 2).bit_length() - 1)] for ids in chosen]


def continue_greedily(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Ids],
    batch_tokens: int,
    max_new_tokens: int | None = None,
    advance: Advance = ignored,
) -> list[list[int]]:
    """Continue prompts with the most probable next token, until the end token or `max_new_tokens`.

    Prompts of one length run together, without padding. Of the checkpoint's generation_config.json only the end
    tokens are used: no sampling, no penalties.

    Args:
        model: in evaluation mode, on its device.
        max_new_tokens: None: `NEW_TOKENS`; never more than the model has positions for.
        advance: called with the number of finished prompts.

    Returns:
        For each prompt the new tokens, an end token included.
    """
    from transformers import GenerationConfig

    ends, padding = end_ids(model, tokenizer), padding_id(model, tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=sorted(ends) or None, pad_token_id=padding
    )
    positions, asked = position_count(model), max_new_tokens or NEW_TOKENS
    made: dict[int, list[int]] = {}
    for rows in length_bucketed([len(prompt) + asked for prompt in prompts], batch_tokens, equal=True):
        length = len(prompts[rows[0]])
        limit = asked if positions is None else max(1, min(asked, positions - length))
        output = generate(model, [prompts[row] for row in rows], padding, 1, limit)
        for row, ids in zip(rows, output, strict=True):
            line = ids[length:]
            kept = len(list(takewhile(lambda token: token not in ends, line)))
            made[row] = line[: kept + 1]
        advance(len(rows))
    return [made[row] for row in range(len(prompts))]


def agreement(first: Sequence[Ids], other: Sequence[Ids]) -> dict[str, float]:
    """Compare one model's continuations with the first model's, of the same prompts.

    Returns:
        `continuations`: their number; `continued_tokens`: mean length of the first model's, end tokens included;
        `tokens_until_difference`: mean number of tokens before the first that differs; `equal_tokens`: fraction of the
        first model's tokens that the other has at the same place.
    """
    same = [[a == b for a, b in zip(*pair, strict=False)] for pair in zip(first, other, strict=True)]
    tokens = sum(map(len, first))
    return {
        "continuations": len(first),
        "continued_tokens": tokens / len(first),
        "tokens_until_difference": sum(len(list(takewhile(bool, one))) for one in same) / len(first),
        "equal_tokens": sum(map(sum, same)) / tokens,
    }
