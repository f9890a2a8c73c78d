"""Scores of translations of several checkpoints, and by how much they differ from those of the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from prunecli.evaluation.comet import comet_scores
from prunecli.evaluation.decoding import Translation
from prunecli.evaluation.group_means import differences, grouped_means
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.scoring import Scores, mean_scores, score, scores_json
from prunecli.evaluation.significance import Significance, bootstrap_of_means, paired_bootstrap
from prunecli.progress import Progress
from prunecli.text.parallel import ParallelText, pair_name

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint

Translations = Mapping[str, Mapping[str, Sequence[Translation]]]
"""Label -> pair -> translations in file order."""


def score_translations(
    opened: Mapping[str, Checkpoint],
    translations: Translations,
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    groups: Mapping[str, str],
    metrics: Mapping[str, Any],
    options: EvaluationOptions,
    progress: Progress,
) -> dict[str, Any]:
    """The fields of evaluation.json that come from scores: means, tests against the first checkpoint, signatures.

    Args:
        opened: label -> checkpoint, the baseline first.
        translations: of all of them.
        groups: language -> group of means; empty: none.
        metrics: as `make_metrics` makes them.

    Raises:
        PruneError: COMET is asked for, and its program fails.
    """
    from prunecli.results.evaluation import Evaluated
    from prunecli.results.header import sizes

    labels = list(translations)
    scores: dict[str, dict[str, Scores]] = {label: {} for label in labels}
    tests: dict[str, dict[str, dict[str, Significance]]] = {label: {} for label in labels}
    compare = len(labels) > 1 and options.samples > 0
    comet = _comet(translations, text, pairs, options, progress)
    with progress("scoring", len(pairs), "pairs") as advance:
        for pair in pairs:
            name, references = pair_name(*pair), text.sentences[pair[1]]
            for label in labels:
                scores[label][name] = score(translations[label][name], references, metrics)
            if compare:
                systems = [[t.text for t in translations[label][name]] for label in labels]
                results = paired_bootstrap(systems, references, metrics, options.samples, options.seed)
                for label, result in zip(labels, results, strict=True):
                    tests[label][name] = result
            if comet:
                own = [comet[label][name] for label in labels]
                for label, values in zip(labels, own, strict=True):
                    known = scores[label][name]
                    scores[label][name] = replace(
                        known, values={**known.values, "comet": float(values.mean())}
                    )
                if compare:
                    of_means = bootstrap_of_means(own, options.samples, options.seed)
                    for label, test_of_means in zip(labels, of_means, strict=True):
                        tests[label][name]["comet"] = test_of_means
            advance(1)
    by_pair = {label: {pair: scores[label][pair_name(*pair)] for pair in pairs} for label in labels}
    evaluated, baseline = [], scores[labels[0]]
    for label, checkpoint in opened.items():
        made = scores[label]
        rows = {name: scores_json(found) for name, found in made.items()}
        for name, by_metric in tests[label].items():
            rows[name]["bootstrap"] = {metric: _significance_json(test) for metric, test in by_metric.items()}
        mean = scores_json(mean_scores(list(made.values())))
        if made is not baseline and len(made) > 1:
            mean["difference"] = differences([(baseline[name], found) for name, found in made.items()])
        tested = [name for name, by_metric in tests[label].items() if by_metric["chrf++"].p_value is not None]
        if tested:
            mean["significant"] = {
                metric: _counts(metric, tested, made, tests[label], baseline, options.level)
                for metric in next(iter(made.values())).values
            }
        compared = None if label == labels[0] else by_pair[labels[0]]
        evaluated.append(
            Evaluated(
                checkpoint=label,
                dtype=options.dtype,
                mean=mean,
                pairs=rows,
                **grouped_means(by_pair[label], groups, compared),
                **sizes(checkpoint),
            )
        )
    signatures = {name: str(metric.get_signature()) for name, metric in metrics.items()}
    if options.comet is not None:
        signatures["comet"] = f"model:{options.comet}|scale:100"
    test = {
        "test": "paired bootstrap",
        "samples": options.samples,
        "seed": options.seed,
        "level": options.level,
    }
    return {
        **({"groups": dict(groups)} if groups else {}),
        "signatures": signatures,
        "significance": {**test, "baseline": labels[0]} if compare else None,
        "results": evaluated,
    }


def _comet(
    translations: Translations,
    text: ParallelText,
    pairs: Sequence[tuple[str, str]],
    options: EvaluationOptions,
    progress: Progress,
) -> dict[str, dict[str, NDArray[np.float64]]]:
    """Label -> pair -> COMET of each sentence, of all pairs in one go; empty where it is not asked for."""
    if options.comet is None:
        return {}
    from prunecli.modules.devices import choose_device

    names = [pair_name(*pair) for pair in pairs]
    with progress("COMET", len(translations) * len(pairs) * len(text), "sentences") as advance:
        scores = comet_scores(
            options.comet,
            [line for pair in pairs for line in text.sentences[pair[0]]],
            [line for pair in pairs for line in text.sentences[pair[1]]],
            {label: [t.text for name in names for t in translations[label][name]] for label in translations},
            gpu=choose_device(options.device).type == "cuda",
        )
        advance(len(translations) * len(pairs) * len(text))
    return {
        label: dict(zip(names, np.split(values, len(names)), strict=True)) for label, values in scores.items()
    }


def _counts(
    metric: str,
    pairs: Sequence[str],
    scores: Mapping[str, Scores],
    tests: Mapping[str, Mapping[str, Significance]],
    baseline: Mapping[str, Scores],
    level: float,
) -> dict[str, int]:
    """Pairs that are significantly worse and better than the baseline."""
    differences = [
        scores[pair].values[metric] - baseline[pair].values[metric]
        for pair in pairs
        if (tests[pair][metric].p_value or 0.0) < level
    ]
    return {"worse": sum(d < 0 for d in differences), "better": sum(d > 0 for d in differences)}


def _significance_json(test: Significance) -> dict[str, float]:
    row = {"mean": round(test.mean, 4), "ci95": round(test.ci95, 4)}
    return row if test.p_value is None else {"p_value": round(test.p_value, 6), **row}
