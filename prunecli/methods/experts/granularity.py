"""Which entries a selection sums over: all, those of pairs, by language (2212.09811, 4.2), or those of texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prunecli.errors import StatisticsError, UsageError
from prunecli.results.gate_sums import SUMS, GateSums
from prunecli.results.gates import ANY, GateStatistics, side_of, split_pair
from prunecli.text.lines import near_names


def aggregate(
    statistics: GateStatistics,
    granularity: str,
    sources: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> GateSums:
    """The sums that a selection is made from, `[layers, experts]`.

    - global: all pairs.
    - pair: the pairs of the given sources with the given targets; a side left out stands for all its
      languages.
    - language: in the encoder all pairs with a given source, in the decoder all with a given target; a side
      left out is summed over all pairs.

    In published files the entries `SOURCE-X` and `X-TARGET` stand for all pairs of that source or target, and
    ratios are averaged where sums are added.

    Raises:
        UsageError: languages that the granularity does not take, or none where it needs them.
        StatisticsError: a language or a pair that the statistics lack.
    """
    if granularity == "global":
        if sources or targets:
            raise UsageError(
                "--granularity global sums over all languages; it takes no --source and no --target.",
                "Leave them out, or choose --granularity language or pair.",
            )
        return _by_side(statistics, _of(statistics, 0, ()), _of(statistics, 1, ()))
    if not sources and not targets:
        known = sorted({*_languages(statistics, 0), *_languages(statistics, 1)})
        more = f" and {len(known) - 8} more" if len(known) > 8 else ""
        raise UsageError(
            f"--granularity {granularity} needs --source or --target.",
            f"Known: {', '.join(known[:8])}{more}.",
        )
    for position, role, asked in ((0, "source", sources), (1, "target", targets)):
        known = _languages(statistics, position)
        for language in asked:
            if language not in known:
                raise StatisticsError(
                    f"The statistics hold no {role} language {language!r}.",
                    near_names(language, known, "Collected"),
                )
    if granularity == "pair":
        pairs = _pairs(statistics, sources, targets)
        return _by_side(statistics, pairs, pairs)
    return _by_side(statistics, _of(statistics, 0, sources), _of(statistics, 1, targets))


def aggregate_texts(statistics: GateStatistics, texts: Sequence[str] = ()) -> GateSums:
    """The sums of some texts together, by default of all, `[layers, experts]`; every token weighs alike.

    Raises:
        StatisticsError: a text that the statistics lack.
    """
    for text in texts:
        if text not in statistics.entries:
            raise StatisticsError(
                f"The statistics hold no text {text!r}.",
                near_names(text, list(statistics.entries), "Collected"),
            )
    return statistics.combined(sorted(set(texts or statistics.entries)))


def _by_side(statistics: GateStatistics, encoder: Sequence[str], decoder: Sequence[str]) -> GateSums:
    """Encoder layers from the entries `encoder`, decoder layers from `decoder`, combined in sorted order."""
    sums = {
        side: statistics.combined(sorted(pairs))
        for side, pairs in (("encoder", encoder), ("decoder", decoder))
    }
    sides = [side_of(layer) for layer in statistics.layers]
    return GateSums(
        *(np.stack([getattr(sums[side], name)[row] for row, side in enumerate(sides)]) for name in SUMS)
    )


def _of(statistics: GateStatistics, position: int, asked: Sequence[str]) -> list[str]:
    """Entries of the asked sources (position 0) or targets (1), by default of all.

    Per language the one entry that stands for all of its pairs, `SOURCE-X` or `X-TARGET`, else its pairs.
    """
    entries = []
    for language in dict.fromkeys(asked or _languages(statistics, position) or [ANY]):
        whole = (f"{language}-{ANY}", f"{ANY}-{language}")[position]
        pairs = [pair for pair in statistics.entries if split_pair(pair)[position] == language]
        entries += [whole] if whole in statistics.entries else pairs
    return entries


def _pairs(statistics: GateStatistics, sources: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The given sources with the given targets, a language with itself left out."""
    if sources and targets:
        asked = [f"{s}-{t}" for s in dict.fromkeys(sources) for t in dict.fromkeys(targets) if s != t]
        if not asked:
            raise UsageError(f"{sources[0]} to {targets[0]} is no translation.", "Name two languages.")
    else:
        asked = [
            pair
            for pair in statistics.entries
            for source, target in [split_pair(pair)]
            if ANY not in (source, target) and (source in sources or target in targets)
        ]
    missing = [pair for pair in asked if pair not in statistics.entries]
    if missing or not asked:
        raise StatisticsError(
            f"The statistics lack the pair {missing[0]}."
            if missing
            else "The statistics hold no pairs of these.",
            "Collect its gates and give both files, or choose --granularity language.",
        )
    return asked


def _languages(statistics: GateStatistics, position: int) -> list[str]:
    """Sources (0) or targets (1), in the order of the entries."""
    languages = dict.fromkeys(split_pair(pair)[position] for pair in statistics.entries)
    return [language for language in languages if language != ANY]
