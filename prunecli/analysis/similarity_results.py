"""similarity.json from similarity matrices: corresponding components, means by side, benchmarks (2309.01826, 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from prunecli.analysis.model_similarity import Comparison
from prunecli.results.similarity import Similarity

if TYPE_CHECKING:
    import pandas as pd

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
    columns, digits = ["first", "second"], dict[str, int]()
    for measure in measures:
        columns.append(measure)
        digits[measure] = 6
        for name, others in (("benchmark", benchmarks), ("random", randoms)):
            if others:
                known = pd.concat([diagonal(other)[measure] for other in others]).groupby(level=KEY).mean()
                pairs[f"{measure}_{name}"] = known.reindex(pairs.index)
                columns.append(f"{measure}_{name}")
                digits[f"{measure}_{name}"] = 6
            if others and name == "benchmark":
                whole = pairs[f"{measure}_benchmark"].replace(0, np.nan)
                pairs[f"{measure}_normalised"] = 100 * pairs[measure] / whole
                columns.append(f"{measure}_normalised")
                digits[f"{measure}_normalised"] = 4
    means: dict[str, dict[str, Any]] = {}
    for side, own in pairs.groupby(level="side", sort=False):
        mean = means[str(side)] = {measure: _rounded(own[measure].mean(), 6) for measure in measures}
        for measure in measures if benchmarks else ():
            known = own[own[f"{measure}_normalised"].notna()]
            # A quotient of two means, not a mean of quotients.
            share = 100 * known[measure].mean() / known[f"{measure}_benchmark"].mean()
            mean[f"{measure}_normalised"] = _rounded(share, 4)
        for measure in measures if randoms else ():
            mean[f"{measure}_random"] = _rounded(own[f"{measure}_random"][own[measure].notna()].mean(), 6)
    same = np.isnan(np.diagonal(next(iter(comparison.similarities.values()))))
    models = {"first": (comparison.first, same[: len(comparison.first)])}
    if not alone:
        models["second"] = (comparison.second, same[len(comparison.first) :])
    parts = {"first": comparison.within_first}
    if not alone:
        parts |= {"second": comparison.within_second, "between": comparison.between}
    return Similarity.model_validate(
        {
            **about,
            "components": {name: components for name, (components, _) in models.items()},
            "left_out": {
                name: {
                    "removed": list(removed),
                    "constant": [one.name for one, is_same in zip(components, flags, strict=True) if is_same],
                }
                for (name, (components, flags)), removed in zip(
                    models.items(), comparison.removed, strict=False
                )
            },
            "matrices": {
                measure: {
                    name: [[_rounded(value, 6) for value in row] for row in part(measure).tolist()]
                    for name, part in parts.items()
                }
                for measure in measures
            },
            "successive" if alone else "corresponding": [
                {key: _rounded(value, digits[key]) if key in digits else value for key, value in row.items()}
                for row in pairs[columns].to_dict("records")
            ],
            "mean": {side: means[side] for side in ("encoder", "decoder") if side in means},
        }
    )


def _rounded(value: float, digits: int) -> float | None:
    return None if np.isnan(value) else round(float(value), digits)
