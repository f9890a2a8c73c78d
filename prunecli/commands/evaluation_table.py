"""The tables of `evaluate`: one row per pair with a block of columns per checkpoint, and the means."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from prunecli.commands import console

TITLES = {"chrf++": "chrF++", "bleu": "BLEU", "spbleu": "spBLEU"}
WIDE = 4
"""With more checkpoints than this, a block holds chrF++ alone, so that the table fits 120 columns."""
LABEL_WIDTH = 12


def mean_table(payload: Mapping[str, Any]) -> console.Shown:
    """One row per checkpoint: the mean over the pairs, or the scores of the only pair."""
    pairs = payload["pairs"]
    metrics = [name for name in TITLES if name in payload["signatures"]]
    compared = payload["significance"] is not None
    many = len(pairs) > 1
    over = f"mean of {len(pairs)} pairs" if many else pairs[0]
    columns = ["checkpoint", *(TITLES[name] for name in metrics), "length", "over-gen."]
    columns += ["worse", "better"] if compared and many else []
    rows = []
    for result in payload["results"]:
        mean = result["mean"]
        marks = {} if many else result["pairs"][pairs[0]]
        row = [
            result["checkpoint"],
            *(_score(mean[name], _p_value(marks, name), payload) for name in metrics),
        ]
        row += [f"{mean['length_ratio']:.2f}", f"{mean['over_generated']:.1%}"]
        if compared and many:
            counts = mean.get("significant", {}).get("chrf++")
            row += ["", ""] if counts is None else [str(counts["worse"]), str(counts["better"])]
        rows.append(row)
    title = f"{payload['data']['split']}, {over}, beam {payload['decoding']['beam']}"
    return console.table(title, columns, rows)


def pair_table(payload: Mapping[str, Any]) -> console.Shown:
    """One row per pair, one block of columns per checkpoint, the mean last."""
    results, metrics = payload["results"], _metrics(payload)
    columns = ["pair", *_blocks(payload)]
    rows = [
        [pair, *(_cell(result["pairs"][pair], name, payload) for result in results for name in metrics)]
        for pair in payload["pairs"]
    ]
    rows.append(["mean", *(f"{result['mean'][name]:.1f}" for result in results for name in metrics)])
    sentences = payload["data"]["sentences"]
    return console.table(f"{payload['data']['split']}, {sentences:,} sentences a pair", columns, rows)


def group_table(payload: Mapping[str, Any]) -> console.Shown:
    """One row per group of sources and group of targets, one block of columns per checkpoint."""
    results, metrics = payload["results"], _metrics(payload)
    rows = []
    for index, mean in enumerate(results[0]["by_group"]):
        scores = (f"{result['by_group'][index][name]:.1f}" for result in results for name in metrics)
        rows.append([mean["source"], mean["target"], str(mean["pairs"]), *scores])
    title = "Means by group of languages"
    return console.table(title, ["from", "to", "pairs", *_blocks(payload)], rows, text_columns=2, keys=2)


def _metrics(payload: Mapping[str, Any]) -> tuple[str, ...]:
    """What a checkpoint's block holds."""
    second = "spbleu" if "spbleu" in payload["signatures"] else "bleu"
    return ("chrf++", second) if len(payload["results"]) <= WIDE else ("chrf++",)


def _blocks(payload: Mapping[str, Any]) -> list[str]:
    """Headings of the checkpoints' columns."""
    metrics, columns = _metrics(payload), []
    for result in payload["results"]:
        label = textwrap.fill(result["checkpoint"], LABEL_WIDTH)
        columns += [f"{label}\n{TITLES[metrics[0]]}", *(f"\n{TITLES[name]}" for name in metrics[1:])]
    return columns


def _cell(scores: Mapping[str, Any], metric: str, payload: Mapping[str, Any]) -> str:
    return _score(scores[metric], _p_value(scores, metric), payload)


def _p_value(scores: Mapping[str, Any], metric: str) -> float | None:
    found: float | None = scores.get("bootstrap", {}).get(metric, {}).get("p_value")
    return found


def _score(value: float, p_value: float | None, payload: Mapping[str, Any]) -> str:
    test = payload["significance"]
    significant = test is not None and p_value is not None and p_value < test["level"]
    return f"{value:.1f}{'*' if significant else ''}"
