"""Similarity of two models' components (2309.01826, sections 2.3 and 4.4): CKA and LNS of all of them."""

from __future__ import annotations

import gc
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.representations import Component, components
from prunecli.errors import DataError, UsageError
from prunecli.evaluation.options import Measure, SimilarityOptions
from prunecli.progress import Progress, silent
from prunecli.results.similarity import Similarity
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import PlainText

if TYPE_CHECKING:
    import pandas as pd

    from prunecli.analysis.representations import Representations
    from prunecli.model.checkpoint import Checkpoint


LEAST = 20
"""Sentences below which neither measure is meaningful."""


@dataclass(frozen=True)
class Portion:
    """Sentences that are compared with each other: those of one language pair, or plain texts.

    Attributes:
        name: of the pair, or of the files.
        sources: input of the encoder, or of the only stack.
        targets: input of the decoder; None for plain texts.
        pair: languages of the two.
    """

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...] | None = None
    pair: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        """Refuse too few sentences.

        Raises:
            DataError: fewer than `LEAST`.
        """
        if len(self) < LEAST:
            raise DataError(
                f"{self.name}: {len(self):,} sentences are too few to compare models on",
                f"Give at least {LEAST}, better some thousand.",
            )

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def sha256(self) -> str:
        """A hash of the sentences."""
        return hashlib.sha256("\n".join((*self.sources, "", *(self.targets or ()))).encode()).hexdigest()


@dataclass(frozen=True)
class Comparison:
    """The similarities of the components of two models, or of one.

    Attributes:
        first, second: the components that have outputs; the second is empty if one model stands alone.
        removed: names of removed components of each.
        widths: of the outputs of each.
        similarities: measure -> `[first and second, first and second]`, mean over the portions; NaN for components
            with the same output for every sentence.
    """

    first: tuple[Component, ...]
    second: tuple[Component, ...]
    removed: tuple[tuple[str, ...], tuple[str, ...]]
    widths: tuple[int, int]
    similarities: Mapping[Measure, NDArray[np.float64]]

    def part(self, name: str, measure: Measure) -> NDArray[np.float64]:
        """The similarities within the `first` or the `second` model, or `between` both: `[rows, columns]`."""
        count, whole = len(self.first), self.similarities[measure]
        if name == "between":
            return whole[:count, count:]
        return whole[:count, :count] if name == "first" else whole[count:, count:]


def parallel_portions(text: ParallelText, pairs: Sequence[tuple[str, str]]) -> tuple[Portion, ...]:
    """A portion for each pair, without the lines that are blank on either side.

    Raises:
        DataError: a pair has fewer than `LEAST` sentences.
    """
    portions = []
    for pair in pairs:
        lines = zip(*(text.sentences[language] for language in pair), strict=True)
        both = [line for line in lines if all(map(str.strip, line))]
        sources, targets = (tuple(line[side] for line in both) for side in (0, 1))
        portions.append(Portion(pair_name(*pair), sources, targets, pair))
    return tuple(portions)


def plain_portions(text: PlainText) -> tuple[Portion, ...]:
    """All texts as one portion.

    Raises:
        DataError: there are fewer than `LEAST`.
    """
    return (Portion(", ".join(path.name for path in text.files), text.texts),)


def compare(
    checkpoints: Mapping[str, Checkpoint],
    portions: Sequence[Portion],
    options: SimilarityOptions,
    progress: Progress = silent,
) -> dict[str, Comparison]:
    """Compare the first checkpoint with each of the others, or with itself if there are no others.

    One model is in memory at a time. The outputs of the first are in temporary files (4 bytes x components x sentences
    x width); those of the others too, for one portion at a time.

    Args:
        checkpoints: label -> checkpoint.
        portions: compared one by one; similarities are their means.

    Returns:
        Label of each other checkpoint, or of the only one -> comparison. Random weights have the labels of
        `random_label`.

    Raises:
        PruneError: a checkpoint, text or option that cannot be used, or outputs that are not finite.
    """
    for checkpoint in checkpoints.values():
        _require_text(checkpoint, portions)
    counts = {portion.name: neighbours_of(portion, options) for portion in portions}
    (label, first), *others = checkpoints.items()
    with tempfile.TemporaryDirectory(prefix="prunecli-") as directory:
        scratch = Path(directory)
        own = dict(_represented(label, first, portions, options, scratch, progress, keep=True))
        compared: list[tuple[str, Checkpoint, int | None]] = [(name, other, None) for name, other in others]
        compared += [(random_label(seed), first, seed) for seed in options.seeds]
        if not compared:
            found = [_similarities((outputs,), options, counts[name]) for name, outputs in own.items()]
            return {label: _comparison([(first, next(iter(own.values())))], found)}
        comparisons = {}
        for label, other, seed in compared:
            found = []
            for name, outputs in _represented(label, other, portions, options, scratch, progress, seed=seed):
                found.append(_similarities((own[name], outputs), options, counts[name]))
            comparisons[label] = _comparison([(first, own[name]), (other, outputs)], found)
        return comparisons


def random_label(seed: int) -> str:
    """Label of random weights among the comparisons: no directory's name."""
    return f"random weights, seed {seed}"


def neighbours_of(portion: Portion, options: SimilarityOptions) -> int | None:
    """k of LNS for this portion; None without LNS.

    Raises:
        UsageError: there is no such k.
    """
    from prunecli.analysis.representations import neighbour_count

    return neighbour_count(options.neighbours, len(portion)) if "lns" in options.measures else None


def _require_text(checkpoint: Checkpoint, portions: Sequence[Portion]) -> None:
    """Refuse text of the wrong kind before a model is loaded."""
    parallel = any(portion.pair is not None for portion in portions)
    stacks = checkpoint.require_architecture().stacks
    if len(stacks) > 1 and not parallel:
        raise UsageError(
            f"{checkpoint.path}: an encoder with a decoder reads pairs of sentences, not `files`",
            "Give `data=DIR`, or `source_file`, `target_file` and `pairs`.",
        )
    if len(stacks) == 1 and parallel:
        raise UsageError(
            f"{checkpoint.path}: a model with one stack reads plain text, not pairs of sentences",
            "Give `files=FILE`, one sentence a line.",
        )


def _represented(
    label: str,
    checkpoint: Checkpoint,
    portions: Sequence[Portion],
    options: SimilarityOptions,
    scratch: Path,
    progress: Progress,
    *,
    keep: bool = False,
    seed: int | None = None,
) -> Iterator[tuple[str, Representations]]:
    """Name of each portion, and the outputs of the model on it; without `keep` they last until the next portion.

    Args:
        seed: of random weights in float32 that replace the checkpoint's.
    """
    from prunecli.analysis.representations import represent
    from prunecli.modules.devices import choose_device
    from prunecli.modules.drawing import random_model
    from prunecli.modules.loading import load_model
    from prunecli.running.encoding import text_examples, translation_examples
    from prunecli.running.examples import Examples
    from prunecli.running.runner import InMemory
    from prunecli.text.tokens import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.path)
    if seed is None:
        model = load_model(checkpoint.path, device=options.device, dtype=options.dtype)
    else:
        model = random_model(checkpoint, seed).to(choose_device(options.device)).eval()
    with progress(f"{label}: reading", sum(map(len, portions)), "sentences") as advance:
        for portion in portions:
            examples: Examples
            if portion.pair is None or portion.targets is None:
                examples = text_examples(tokenizer, model, portion.sources, options.context, skip_empty=False)
            else:
                sentences = dict(zip(portion.pair, (portion.sources, portion.targets), strict=True))
                text = ParallelText(portion.name, sentences)
                examples = translation_examples(tokenizer, model, text, [portion.pair])
            batches = examples.batches(options.batch_tokens)
            directory = Path(tempfile.mkdtemp(dir=scratch))
            yield (
                portion.name,
                represent(InMemory(model), components(checkpoint), batches, directory, advance),
            )
            if not keep:
                shutil.rmtree(directory)
    del model
    gc.collect()  # before the next one is loaded


def _similarities(
    models: Sequence[Representations], options: SimilarityOptions, k: int | None
) -> dict[Measure, NDArray[np.float64]]:
    """Measure -> the similarities of all components of `models`, a square matrix."""
    from prunecli.analysis.representations import linear_cka, local_neighbourhood_similarity

    features = [array for model in models for array in model.features]
    found: dict[Measure, NDArray[np.float64]] = {}
    if "cka" in options.measures:
        found["cka"] = linear_cka(features)
    if k is not None:
        found["lns"] = local_neighbourhood_similarity(features, k)
    return found


def _comparison(
    models: Sequence[tuple[Checkpoint, Representations]],
    similarities: Sequence[Mapping[Measure, NDArray[np.float64]]],
) -> Comparison:
    """Comparison of one or two models from the similarities on each portion."""
    held = [outputs.components for _, outputs in models]
    removed = [tuple(one.name for one in components(made) if one.removed) for made, _ in models]
    widths = [outputs.width for _, outputs in models]
    return Comparison(
        held[0],
        held[1] if len(models) > 1 else (),
        (removed[0], removed[1] if len(models) > 1 else ()),
        (widths[0], widths[1] if len(models) > 1 else 0),
        {measure: np.mean([each[measure] for each in similarities], axis=0) for measure in similarities[0]},
    )


KEY = ["side", "layer", "kind"]


def diagonal(comparison: Comparison) -> pd.DataFrame:
    """Similarity of each component of the first model to that of the same side, layer and kind in the second.

    If one model stands alone, of each component to the next of its side: similar successors are redundant (4.4.2).

    Returns:
        A row for each two components, indexed by side, layer and kind of the first; columns `first` and `second`
        (names) and the measures. NaN: a component has the same output for every sentence.
    """
    import pandas as pd

    first, second = comparison.first, comparison.second
    if second:
        held = {component.key: len(first) + place for place, component in enumerate(second)}
        ends = [(row, held[one.key]) for row, one in enumerate(first) if one.key in held]
    else:
        ends = [(row, row + 1) for row in range(len(first) - 1) if first[row].side == first[row + 1].side]
    both, (rows, columns) = (*first, *second), np.array(ends, np.int64).reshape(-1, 2).T
    index = pd.MultiIndex.from_tuples([both[row].key for row in rows] or [("", 0, "")], names=KEY)
    found: dict[str, Any] = {name: values[rows, columns] for name, values in comparison.similarities.items()}
    names = {
        end: [both[place].name for place in places] for end, places in (("first", rows), ("second", columns))
    }
    return pd.DataFrame({**names, **found}, index=index[: len(ends)])


def similarity_of(
    comparison: Comparison,
    benchmarks: Sequence[Comparison] = (),
    randoms: Sequence[Comparison] = (),
    /,
    **about: Any,
) -> Similarity:
    """similarity.json: components, matrices, the diagonal (or successive pairs) and its means.

    Args:
        comparison: of two models, or of one.
        benchmarks: comparisons of the first model with others like it, which are the 100 % (2309.01826, 4.4).
        randoms: comparisons of the first model with random weights, the lower bound (section 3).
        about: the fields that say what was compared, from the header to `text`.
    """
    import pandas as pd

    measures, alone = list(comparison.similarities), not comparison.second
    pairs = diagonal(comparison)
    digits: dict[str, int] = {}
    for measure in measures:
        digits[measure] = 6
        for name, others in (("benchmark", benchmarks), ("random", randoms)):
            if others:
                known = pd.concat([diagonal(other)[measure] for other in others]).groupby(level=KEY).mean()
                pairs[f"{measure}_{name}"] = known.reindex(pairs.index)
                digits[f"{measure}_{name}"] = 6
        if benchmarks:
            whole = pairs[f"{measure}_benchmark"].replace(0, np.nan)
            pairs[f"{measure}_normalised"] = 100 * pairs[measure] / whole
            digits[f"{measure}_normalised"] = 4
    means: dict[str, dict[str, Any]] = {}
    for side, own in pairs.groupby(level="side", sort=False):
        found: dict[str, Any] = {measure: own[measure].mean() for measure in measures}
        for measure in measures if benchmarks else ():
            known = own[own[f"{measure}_normalised"].notna()]
            # A quotient of two means, not a mean of quotients.
            share = known[measure].mean() / known[f"{measure}_benchmark"].mean()
            found[f"{measure}_normalised"] = 100 * share
        for measure in measures if randoms else ():
            found[f"{measure}_random"] = own[f"{measure}_random"][own[measure].notna()].mean()
        means[str(side)] = {name: _listed(np.array(value), digits[name]) for name, value in found.items()}
    listed = pairs[["first", "second", *digits]].round(digits).astype(object)
    same = np.isnan(np.diagonal(comparison.similarities[measures[0]]))
    models = (
        {"first": comparison.first} if alone else {"first": comparison.first, "second": comparison.second}
    )
    start, left_out = 0, {}
    for (name, held), removed in zip(models.items(), comparison.removed, strict=False):
        constant = [one.name for one, is_same in zip(held, same[start:], strict=False) if is_same]
        left_out[name], start = {"removed": list(removed), "constant": constant}, start + len(held)
    return Similarity.model_validate(
        {
            **about,
            "components": models,
            "left_out": left_out,
            "matrices": {
                measure: {
                    name: _listed(comparison.part(name, measure))
                    for name in (*models, *(() if alone else ("between",)))
                }
                for measure in measures
            },
            "successive" if alone else "corresponding": listed.where(listed.notna(), None).to_dict("records"),
            "mean": {side: means[side] for side in ("encoder", "decoder") if side in means},
        }
    )


def _listed(values: NDArray[np.float64], digits: int = 6) -> Any:
    """Rounded numbers as JSON has them, None for NaN."""
    missing: Any = None
    return np.where(np.isnan(values), missing, np.round(values, digits)).tolist()
