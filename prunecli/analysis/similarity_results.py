"""What similarity matrices say: corresponding components, means by side, shares of a benchmark (2309.01826, 4.4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.components import Component, Key, matched
from prunecli.analysis.model_similarity import Comparison, Measure
from prunecli.architectures.records import Side
from prunecli.results.similarity import Similarity

SIDES: tuple[Side, ...] = ("encoder", "decoder")


@dataclass(frozen=True)
class Pair:
    """Two components and how alike they are.

    Attributes:
        first, second: of the two models, or of one.
        values: measure -> similarity in [0, 1], or None: one of the two has the same output for every sentence.
        benchmark: measure -> what it is between the first model and the benchmarks, on average; left out where there
            is none.
        random: the same of random weights.
    """

    first: Component
    second: Component
    values: Mapping[Measure, float | None]
    benchmark: Mapping[Measure, float] = field(default_factory=dict)
    random: Mapping[Measure, float] = field(default_factory=dict)

    def normalised(self, measure: Measure) -> float | None:
        """The similarity in percent of the benchmark's."""
        value, whole = self.values[measure], self.benchmark.get(measure)
        return None if value is None or not whole else 100 * value / whole


@dataclass(frozen=True)
class SideMean:
    """Means over one side's components; None where there is nothing to average.

    Attributes:
        values: measure -> mean similarity.
        normalised: measure -> that in percent of the benchmark's, over the components that have both.
        random: measure -> mean similarity to random weights, over the components that have both.
    """

    values: Mapping[Measure, float | None]
    normalised: Mapping[Measure, float | None]
    random: Mapping[Measure, float | None]


def corresponding(
    comparison: Comparison, benchmarks: Sequence[Comparison] = (), randoms: Sequence[Comparison] = ()
) -> list[Pair]:
    """The diagonal: each component of the first model with that of the same side, layer and kind in the second.

    Args:
        benchmarks: of the first model with others like it, which are the 100 % (2309.01826, 4.4).
        randoms: of the first model with random weights of its architecture, the lower bound (section 3).
    """
    reference, lowest = _diagonal_means(benchmarks), _diagonal_means(randoms)
    return [
        Pair(
            comparison.first[row],
            comparison.second[column],
            {
                measure: _value(comparison.between(measure), row, column)
                for measure in comparison.similarities
            },
            *(
                {
                    measure: value
                    for measure in comparison.similarities
                    if (value := means.get((measure, comparison.first[row].key))) is not None
                }
                for means in (reference, lowest)
            ),
        )
        for row, column in matched(comparison.first, comparison.second)
    ]


def successive(comparison: Comparison) -> list[Pair]:
    """Each component of the first model with the next of its side: what is alike there is redundant (4.4.2)."""
    held = comparison.first
    return [
        Pair(
            held[row],
            held[row + 1],
            {
                measure: _value(comparison.within_first(measure), row, row + 1)
                for measure in comparison.similarities
            },
        )
        for row in range(len(held) - 1)
        if held[row].side == held[row + 1].side
    ]


def side_means(pairs: Sequence[Pair], measures: Sequence[Measure]) -> dict[Side, SideMean]:
    """Side -> means over its pairs; the normalised one is a quotient of two means, not a mean of quotients."""
    found = {}
    for side in SIDES:
        own = [pair for pair in pairs if pair.first.side == side]
        if own:
            values = {measure: _mean([pair.values[measure] for pair in own]) for measure in measures}
            found[side] = SideMean(
                values,
                {measure: _normalised(own, measure) for measure in measures},
                {
                    measure: _mean(
                        [pair.random.get(measure) for pair in own if pair.values[measure] is not None]
                    )
                    for measure in measures
                },
            )
    return found


def _normalised(pairs: Sequence[Pair], measure: Measure) -> float | None:
    both = [pair for pair in pairs if pair.normalised(measure) is not None]
    mean = _mean([pair.values[measure] for pair in both])
    whole = _mean([pair.benchmark[measure] for pair in both])
    return None if mean is None or not whole else 100 * mean / whole


def _diagonal_means(comparisons: Sequence[Comparison]) -> dict[tuple[Measure, Key], float]:
    """Means of the diagonal over comparisons of the first model with others of its shape."""
    found: dict[tuple[Measure, Key], list[float | None]] = {}
    for comparison in comparisons:
        for pair in corresponding(comparison):
            for measure, value in pair.values.items():
                found.setdefault((measure, pair.first.key), []).append(value)
    means = {key: _mean(values) for key, values in found.items()}
    return {key: mean for key, mean in means.items() if mean is not None}


def constant_components(comparison: Comparison) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the components of either model whose output is the same for every sentence."""
    matrix = next(iter(comparison.similarities.values()))
    same = np.isnan(np.diagonal(matrix))
    cut = len(comparison.first)
    first, second = (
        tuple(part.name for part, is_same in zip(parts, flags, strict=True) if is_same)
        for parts, flags in ((comparison.first, same[:cut]), (comparison.second, same[cut:]))
    )
    return first, second


def similarity_of(
    comparison: Comparison,
    references: Sequence[Comparison] = (),
    randoms: Sequence[Comparison] = (),
    /,
    **about: Any,
) -> Similarity:
    """similarity.json: components, matrices, the diagonal (or successive pairs) and its means.

    Args:
        comparison: of two models, or of one.
        references, randoms: `benchmarks` and `randoms` of `corresponding`.
        about: the fields that say what was compared, from the header to `text`.
    """
    measures, alone = list(comparison.similarities), not comparison.second
    pairs = successive(comparison) if alone else corresponding(comparison, references, randoms)
    constants = constant_components(comparison)
    components = {"first": comparison.first} | ({} if alone else {"second": comparison.second})
    left_out = zip(components, comparison.removed, constants, strict=False)
    return Similarity.model_validate(
        {
            **about,
            "components": components,
            "left_out": {
                name: {"removed": list(removed), "constant": list(constant)}
                for name, removed, constant in left_out
            },
            "matrices": {measure: _matrices(comparison, measure) for measure in measures},
            "successive" if alone else "corresponding": [
                _row(pair, bool(references), bool(randoms)) for pair in pairs
            ],
            "mean": {
                side: {
                    f"{measure}{suffix}": _rounded(means[measure], digits)
                    for suffix, means, digits, is_known in (
                        ("", mean.values, 6, True),
                        ("_normalised", mean.normalised, 4, references),
                        ("_random", mean.random, 6, randoms),
                    )
                    for measure in measures
                    if is_known
                }
                for side, mean in side_means(pairs, measures).items()
            },
        }
    )


def _matrices(comparison: Comparison, measure: Measure) -> dict[str, list[list[float | None]]]:
    made = {"first": comparison.within_first(measure)}
    if comparison.second:
        made |= {"second": comparison.within_second(measure), "between": comparison.between(measure)}
    return {
        name: [[_rounded(value) for value in row] for row in matrix.tolist()] for name, matrix in made.items()
    }


def _row(pair: Pair, with_benchmarks: bool, with_randoms: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"first": pair.first.name, "second": pair.second.name}
    for measure, value in pair.values.items():
        row[measure] = _rounded(value)
        if with_benchmarks:
            row[f"{measure}_benchmark"] = _rounded(pair.benchmark.get(measure))
            row[f"{measure}_normalised"] = _rounded(pair.normalised(measure), 4)
        if with_randoms:
            row[f"{measure}_random"] = _rounded(pair.random.get(measure))
    return row


def _value(matrix: NDArray[np.float64], row: int, column: int) -> float | None:
    value = float(matrix[row, column])
    return None if math.isnan(value) else value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rounded(value: float | None, digits: int = 6) -> float | None:
    return None if value is None or math.isnan(value) else round(value, digits)
