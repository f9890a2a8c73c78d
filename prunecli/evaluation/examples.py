"""Inputs on which models differ most, with the outputs of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from prunecli.evaluation.decoding import Translation
from prunecli.text.parallel import ParallelText, pair_name

if TYPE_CHECKING:
    from prunecli.results.evaluation import Example

LOOKED_AT = 200
"""Sentences of all pairs among which the examples are chosen, spread evenly."""


def examples_of(
    translations: Mapping[str, Mapping[str, Sequence[Translation]]],
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    count: int,
) -> list[Example]:
    """The `count` sentences where the other outputs are least like those of the first checkpoint, by chrF++.

    If there is one checkpoint, its outputs are compared with the references.

    Args:
        translations: label -> pair -> translations in file order, the baseline first.
    """
    from sacrebleu.metrics import CHRF

    from prunecli.results.evaluation import Example

    metric, (first, *others) = CHRF(word_order=2), translations.values()
    rows = [(pair, index) for pair in pairs for index in range(len(text))]
    found = []
    for pair, index in rows[:: -(-len(rows) // LOOKED_AT)]:
        name, reference = pair_name(*pair), text.sentences[pair[1]][index]
        right = first[name][index].text if others else reference
        alike = sum(metric.sentence_score(own[name][index].text, [right]).score for own in others or [first])
        outputs = {label: own[name][index].text for label, own in translations.items()}
        source = text.sentences[pair[0]][index]
        found.append((alike, Example(pair=name, source=source, reference=reference, outputs=outputs)))
    return [example for _, example in sorted(found, key=lambda scored: scored[0])[:count]]
