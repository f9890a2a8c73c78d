"""The scores of evaluation.json as tables show them: titles, number formats, and what a difference means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """A score of a task.

    Attributes:
        title: of its column.
        form: of its numbers, as `format` takes it.
        in_percent: whether a difference is a share of the first one's score, not a number of points: perplexity
            has no natural unit.
        of_two: whether it compares with the first checkpoint already.
        closing: whether the closing table of a recipe has it.
    """

    title: str
    form: str
    in_percent: bool = False
    of_two: bool = False
    closing: bool = False

    def difference(self, value: float, first: float) -> str:
        """What `value` differs by from the first checkpoint's: `-0.8`, `+7.5%`."""
        if self.in_percent:
            return percent(value, first)
        if self.form.endswith("%"):
            return f"{100 * (value - first):+.1f}"
        return format(value - first, f"+{self.form}")


def percent(value: float, first: float) -> str:
    """The change from `first` to `value`: `-72%`, `+7.5%`; whole percents from ten on."""
    if not first:
        return ""
    change = 100 * (value - first) / abs(first)
    return f"{change:+,.{0 if abs(change) >= 10 else 1}f}%"


SCORES: Mapping[str, Mapping[str, Score]] = {
    "translation": {
        "chrf++": Score("chrF++", ".1f", closing=True),
        "chrf": Score("chrF", ".1f"),
        "bleu": Score("BLEU", ".1f", closing=True),
        "spbleu": Score("spBLEU", ".1f", closing=True),
        "comet": Score("COMET", ".1f", closing=True),
    },
    "lm": {
        "perplexity": Score("perplexity", ",.3f", in_percent=True, closing=True),
        "bits_per_byte": Score("bits/byte", ".4f"),
        "bits_per_character": Score("bits/char.", ".4f"),
        "tokens": Score("tokens", ",d"),
        "kl_divergence": Score("KL, nats", ".4f", of_two=True, closing=True),
        "top1_agreement": Score("same top-1", ".1%", of_two=True, closing=True),
        "tokens_until_difference": Score("same until", ".1f", of_two=True),
        "equal_tokens": Score("same tokens", ".1%", of_two=True),
    },
    "mlm": {
        "loss": Score("loss, nats", ".4f"),
        "perplexity": Score("exp(loss)", ",.3f", in_percent=True, closing=True),
        "tokens": Score("hidden tokens", ",d"),
    },
    "classification": {
        "accuracy": Score("accuracy", ".1%", closing=True),
        "f1": Score("macro F1", ".3f", closing=True),
        "matthews": Score("MCC", ".3f", closing=True),
        "loss": Score("loss, nats", ".4f"),
    },
    "embedding": {
        "cosine": Score("cosine to first", ".4f", of_two=True, closing=True),
        "cosine_5_percent": Score("5% below", ".4f", of_two=True),
        "spearman": Score("Spearman", ".4f", closing=True),
        "retrieval": Score("retrieved", ".1%", closing=True),
        "width": Score("width", ",d"),
    },
}
"""Task -> score -> how it is shown."""
