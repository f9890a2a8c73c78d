"""evaluation.json: scores of checkpoints by pair, by source, by target, by group, and their means."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NotRequired

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from prunecli.results.document import (
    Cells,
    Count,
    Document,
    Json,
    Number,
    Record,
    Row,
    Shown,
    Tables,
    first_fault,
    maybe,
    millions,
    numbers,
    scalars,
)
from prunecli.tensors.quantities import counted

OVER, SHORT, LONG = 0.1, 0.7, 1.4
"""Outputs are bad above this share of over-generated ones, and outside these ratios of their length."""
RUINED = 2.0
"""Perplexity relative to the first checkpoint's above which a language model is bad."""
COLUMNS = {
    "bootstrap": {"p_value": "{}_p_value", "": "{}_bootstrap_{}"},
    "difference": {"": "{}_difference_{}"},
    "significant": {"": "{}_pairs_{}"},
}
"""What is said of scores -> name of it -> column."""
WIDE = 4
"""With more checkpoints than this, a table with a column for each has one score."""
SPREAD = {"mean": "+.1f", "std": ".1f", "lowest": "+.1f", "highest": "+.1f"}
"""Figure of a difference over pairs -> its form."""
LOWER_IS_BETTER = {"perplexity", "bits_per_byte", "bits_per_character", "kl_divergence", "loss"}
"""Scores of which less is better."""
LEAST = 30
"""Examples from which tests are shown: with fewer, neither resampling nor a t-test is reliable."""
GROUPS = {"source": "source_group", "target": "target_group"}


class _Tested(TypedDict):
    """A score in the bootstrap test against the first checkpoint's."""

    p_value: NotRequired[Number]
    mean: Number
    ci95: Number


class _Tally(TypedDict):
    """Pairs whose score differs significantly from the first checkpoint's."""

    worse: Count
    better: Count


class _Known(TypedDict, total=False):
    """Entries of `Scores` that are not numbers."""

    bootstrap: dict[str, _Tested]
    difference: dict[str, dict[str, Number]]
    significant: dict[str, _Tally]
    f1_by_class: dict[str, Number]


_KNOWN = TypeAdapter(_Known)


def _sound(scores: Json) -> Json:
    try:
        _KNOWN.validate_python(scores)
    except ValidationError as error:
        raise ValueError(first_fault(error)) from error
    return scores


Scores = Annotated[Json, AfterValidator(_sound)]
"""Scores by name, and what is said of them."""


class Evaluated(Record):
    """One checkpoint's scores: `mean` and `pairs` for translation, `scores` otherwise."""

    checkpoint: str
    dtype: str = ""
    mean: Scores = {}
    pairs: dict[str, Scores] = {}
    by_source: dict[str, Scores] = {}
    by_target: dict[str, Scores] = {}
    by_group: list[Scores] = []
    context: Count | None = None
    stride: Count | None = None
    parameters: Count | None = None
    checkpoint_bytes: Count | None = None
    scores: Scores = {}
    by_text: dict[str, Scores] = {}
    p_value: Number | None = None

    @property
    def main(self) -> Json:
        """The scores of the task; of a translation those of the only pair, or the means over the pairs."""
        alone = [*self.pairs.values()] if len(self.pairs) == 1 else [{}]
        return {**self.mean, **alone[0], **self.scores}


class Example(Record):
    """One input, and what each checkpoint made of this input.

    Attributes:
        pair: direction of a translation.
        text: name of the text that the prompt of a language model is from.
        source: sentence, or prompt.
        reference: translation of the sentence.
        outputs: label of the checkpoint -> output.
    """

    pair: str | None = None
    text: str | None = None
    source: str
    reference: str | None = None
    outputs: dict[str, str] = {}


class Evaluation(Document):
    """evaluation.json; the first of the results is the baseline.

    Attributes:
        examples: inputs on which the checkpoints differ most.
    """

    FORMAT = "prunecli.evaluation/1"

    task: str
    data: Json = {}
    pairs: list[str] = []
    decoding: Json = {}
    groups: dict[str, str] = {}
    signatures: dict[str, str] = {}
    significance: Json | None = None
    results: list[Evaluated] = Field(min_length=1)
    examples: list[Example] = []

    @property
    def tested(self) -> tuple[Evaluation, str | None]:
        """The evaluation without its significance test if there is too little text for one, and a line that says so."""
        test = self.significance
        # McNemar's test is exact: with too little text it finds nothing.
        if test is None or str(test.get("test")).startswith("McNemar"):
            return self, None
        data = numbers(self.data) | numbers(test)
        examples = data.get("examples", data.get("sentences", data.get("texts", LEAST)))
        what = "windows" if "windows" in str(test.get("test")) else "sentences" if self.pairs else "texts"
        few = too_few(int(examples), what)
        return (self.model_copy(update={"significance": None}) if few else self), few

    @property
    def ruined(self) -> Iterator[str]:
        """Yield a line for each checkpoint whose outputs are of a wrong length, or whose perplexity is far worse."""
        first = self.results[0]
        for result in self.results:
            found, base = numbers({**result.mean, **result.scores}), numbers(first.scores)
            over, length = found.get("over_generated", 0.0), found.get("length_ratio", 1.0)
            # Next tokens are compared if the tokens are the same ones; perplexities are then too.
            comparable = "kl_divergence" in found and base.get("perplexity")
            perplexity = found.get("perplexity", 0.0) / base["perplexity"] if comparable else 0.0
            if over > OVER:
                fault = f"{over:.0%} of the outputs run on as if the model repeats itself"
            elif not SHORT < length < LONG:
                fault = f"the outputs are {length:.2f} times as long as the references"
            elif perplexity > RUINED:
                fault = f"the perplexity is {perplexity:,.1f} times that of {first.checkpoint}"
            else:
                continue
            remedy = (
                "Check languages and the longest output, or remove less"
                if result is first
                else "Remove less, or finetune"
            )
            yield f"{result.checkpoint}: {fault}. {remedy}."

    @property
    def shown_scores(self) -> dict[str, Score]:
        """The scores of the task that were measured, by name."""
        measured = {name for one in self.results for name in (*one.main, *self.signatures)}
        return {name: score for name, score in SCORES.get(self.task, {}).items() if name in measured}

    def shown(self, pairs: int | None = None) -> Iterator[Shown]:
        """Yield the scores of each checkpoint; then by pair, by group of languages with differences, and by text.

        Args:
            pairs: with more pairs than this, the scores are not shown by pair. If None, all are shown.
        """
        scores, count, tables = self.shown_scores, len(self.pairs), self._tables()
        tokens = {numbers(one.main).get("tokens", 0.0) for one in self.results}
        title, tested = self._title, (self.significance or {}).get("of")
        if "tokens" in scores and len(tokens) == 1:
            title += f", {tokens.pop():,.0f} {scores.pop('tokens').title}"
        main = [
            {
                "checkpoint": one.checkpoint,
                "parameters": maybe(millions, one.parameters),
                **self._texts({**_scores(one.main), f"{tested}_p_value": one.p_value}, scores),
                "difference": self._test(one),
            }
            for one in self.results
        ]
        yield Shown(title, main)
        second = "spbleu" if "spbleu" in scores else "bleu"
        names = ("chrf++", second) if len(self.results) <= WIDE else ("chrf++",)
        few = {name: score for name, score in scores.items() if name in names}
        if count > 1 and (pairs is None or count <= pairs):
            rows = [{**row, "pair": f"{row['source']}-{row['target']}"} for row in tables["pairs"]]
            rows += [{**row, "pair": "mean"} for row in tables["mean"]]
            yield beside("By pair", rows, {"pair": "pair"}, lambda row: self._texts(row, few))
        if self.groups:
            groups = {"source_group": "from", "target_group": "to", "pairs": "pairs"}
            title, rows = "Means by group of languages", tables["by_group"]
            yield beside(title, rows, groups, lambda row: self._texts(row, few))
            first = self.results[0].checkpoint
            rows += [{**row, "source_group": "all", "target_group": ""} for row in tables["mean"]]
            rows = [row for row in rows if row["checkpoint"] != first]
            title = f"chrF++, difference from {first} over the pairs"
            yield beside(title, rows, groups, _spread)
        by_text = tables["by_text"]
        order = [*dict.fromkeys(row["text"] for row in by_text)]
        texts = [
            {"text": row["text"], "checkpoint": row["checkpoint"], **self._texts(row, self.shown_scores)}
            for row in sorted(by_text, key=lambda row: order.index(row["text"]))
        ]
        yield Shown("By text", texts, 2, 2)

    @property
    def _title(self) -> str:
        data, count = self.data, len(self.pairs)
        if self.task == "translation":
            over = f"mean of {count} pairs" if count > 1 else "".join(self.pairs)
            beam = f"beam {self.decoding['beam']}" if "beam" in self.decoding else ""
            parts = [str(data.get("split", "")), over, beam]
        else:
            files = data.get("files")
            texts = counted(
                int(numbers(data).get("texts", 0)), "document" if data.get("whole_files") else "text"
            )
            parts = [self.task, ", ".join(map(str, files)) if isinstance(files, list) else "", texts]
        return ", ".join(filter(None, parts))

    def _texts(self, row: Row, scores: Mapping[str, Score]) -> Cells:
        """Title of each score -> its text, with a star if it differs significantly from the first checkpoint's."""
        found, texts = numbers(row), Cells()
        level = numbers(self.significance or {}).get("level", 0.0)
        for name, score in scores.items():
            value = int(found.get(name, 0)) if score.form.endswith("d") else found.get(name, 0)
            star = "*" if found.get(f"{name}_p_value", 1.0) < level else ""
            texts[score.title] = f"{value:{score.form}}{star}" if name in found else None
        return texts

    def _test(self, result: Evaluated) -> str | None:
        """The p-value of a single test, or the number of pairs whose chrF++ is significantly worse and better."""
        if self.significance is None:
            return None
        single = numbers(result.main.get("bootstrap", {}).get("chrf++", {})).get("p_value", result.p_value)
        if single is not None:
            return "p < 0.001" if single < 0.001 else f"p = {single:.3f}"
        counts = result.mean.get("significant", {}).get("chrf++")
        return counts and f"{counts['worse']} worse, {counts['better']} better of {len(self.pairs)}"

    def _tables(self) -> Tables:
        """`pairs`, `mean` and `by_source`, `by_target`, `by_group` of translation.

        Of other tasks `scores`, `by_text` and `f1_by_class`.
        """
        found: Tables = defaultdict(list)
        for result in self.results:
            name, about = {"checkpoint": result.checkpoint}, scalars(result.to_json())
            for pair, scores in result.pairs.items():
                source, _, target = pair.partition("-")
                found["pairs"].append({**name, "source": source, "target": target, **_scores(scores)})
            if self.task == "translation":
                found["mean"].append({**about, "pairs": len(result.pairs), **_scores(result.mean)})
            else:
                found["scores"].append({**about, **scalars(result.scores)})
            for side, means in (("source", result.by_source), ("target", result.by_target)):
                rows = ({**name, side: language, **_scores(scores)} for language, scores in means.items())
                found[f"by_{side}"] += rows
            for scores in result.by_group:
                renamed = {GROUPS.get(key, key): value for key, value in scores.items()}
                found["by_group"].append({**name, **_scores(renamed)})
            for text, scores in result.by_text.items():
                found["by_text"].append({**name, "text": text, **scalars(scores)})
            by_class = result.scores.get("f1_by_class", {})
            found["f1_by_class"] += [{**name, "class": key, "f1": value} for key, value in by_class.items()]
        return found


def too_few(examples: int, what: str) -> str | None:
    """The message that replaces a test on too few examples; None if there are enough."""
    if examples >= LEAST:
        return None
    return f"Too few {what} for a test of significance: {examples:,}; give {LEAST} or more."


def beside(title: str, rows: Sequence[Row], keys: Mapping[str, str], cells: Callable[[Row], Cells]) -> Shown:
    """Checkpoints side by side: rows with the same keys are one, each heading with the checkpoint before it.

    Args:
        keys: column of `rows` -> heading of a first column.
        cells: heading -> text, of a row.
    """
    found: dict[tuple[str, ...], Cells] = {}
    for row in rows:
        key = tuple(str(row.get(name)) for name in keys)
        own = found.setdefault(key, dict(zip(keys.values(), key, strict=True)))
        own |= {f"{row['checkpoint']} {heading}": text for heading, text in cells(row).items()}
    # Only the languages of a row are text.
    count = min(len(keys), 2)
    return Shown(title, [*found.values()], count, count)


def _spread(row: Row) -> Cells:
    """How the pairs' chrF++ differs from the first checkpoint's."""
    return {
        name: maybe(f"{{:{form}}}", row.get(f"chrf++_difference_{name}")) for name, form in SPREAD.items()
    }


def _scores(scores: Json) -> Row:
    """The scores, what the significance test says of each, and how it differs from the first checkpoint's."""
    row = scalars(scores)
    for key, columns in COLUMNS.items():
        for metric, values in scores.get(key, {}).items():
            row |= {columns.get(name, columns[""]).format(metric, name): values[name] for name in values}
    return row


@dataclass(frozen=True)
class Score:
    """A score of a task.

    Attributes:
        title: of its column.
        form: of its numbers, as `format` takes it.
        in_percent: whether a difference is a share of the first one's score, not a number of points: perplexity
            has no natural unit.
        of_two: whether it compares with the first checkpoint already.
    """

    title: str
    form: str
    in_percent: bool = False
    of_two: bool = False

    def difference(self, value: float, first: float) -> str:
        """Difference of `value` from the first checkpoint's: `-0.8`, `+7.5%`."""
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


SCORES = {
    "translation": {
        "chrf++": Score("chrF++", ".1f"),
        "chrf": Score("chrF", ".1f"),
        "bleu": Score("BLEU", ".1f"),
        "spbleu": Score("spBLEU", ".1f"),
        "comet": Score("COMET", ".1f"),
        "length_ratio": Score("length", ".2f"),
        "over_generated": Score("over-gen.", ".1%"),
    },
    "lm": {
        "perplexity": Score("perplexity", ",.3f", in_percent=True),
        "bits_per_byte": Score("bits/byte", ".4f"),
        "bits_per_character": Score("bits/char.", ".4f"),
        "tokens": Score("tokens", ",d"),
        "kl_divergence": Score("KL, nats", ".4f", of_two=True),
        "top1_agreement": Score("same top-1", ".1%", of_two=True),
        "tokens_until_difference": Score("same until", ".1f", of_two=True),
        "equal_tokens": Score("same tokens", ".1%", of_two=True),
    },
    "mlm": {
        "loss": Score("loss, nats", ".4f"),
        "perplexity": Score("exp(loss)", ",.3f", in_percent=True),
        "tokens": Score("hidden tokens", ",d"),
    },
    "classification": {
        "accuracy": Score("accuracy", ".1%"),
        "f1": Score("macro F1", ".3f"),
        "matthews": Score("MCC", ".3f"),
        "loss": Score("loss, nats", ".4f"),
    },
    "embedding": {
        "cosine": Score("cosine to first", ".4f", of_two=True),
        "cosine_5_percent": Score("5% below", ".4f", of_two=True),
        "spearman": Score("Spearman", ".4f"),
        "retrieval": Score("retrieved", ".1%"),
        "width": Score("width", ",d"),
    },
}
"""Task -> score -> how it is shown."""
