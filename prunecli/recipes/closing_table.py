"""A recipe's closing table: checkpoints beside what was measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunecli.errors import UnsupportedModelError
from prunecli.evaluation.evaluate import labels_for
from prunecli.model.checkpoint import open_model
from prunecli.recipes.engine import Report
from prunecli.tensors.documents import read_json

COLUMNS = ("experts", "parameters", "size", "chrF++", "BLEU", "spBLEU", "tokens/s", "speed-up")
"""In the order of the table."""

SCORES = {"chrf++": "chrF++", "bleu": "BLEU", "spbleu": "spBLEU"}


def closing_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """The columns and the rows of the table, one row per checkpoint; columns without numbers are left out.

    Scores are means over the language pairs; speed is that of the first batch size and beam, with its
    deviation over the runs: a ratio alone would not show how much of it is noise.

    Raises:
        PruneError: a file that is damaged, or that does not speak of one of the checkpoints.
    """
    labels = {path: label for label, path in labels_for(list(report.checkpoints.values())).items()}
    evaluation = _results(report.evaluation, "prunecli.evaluation/1")
    latency = _results(report.latency, "prunecli.latency/1")
    found = {
        name: {
            **_size(path),
            **_scores(evaluation.get(labels[path], {})),
            **_speed(latency.get(labels[path], {})),
        }
        for name, path in report.checkpoints.items()
    }
    columns = [column for column in COLUMNS if any(column in row for row in found.values())]
    return ["checkpoint", *columns], [
        [name, *(row.get(column, "-") for column in columns)] for name, row in found.items()
    ]


def _results(path: Path | None, format: str) -> dict[str, Mapping[str, Any]]:  # noqa: A002 (the key's name)
    """Checkpoint's label -> its results."""
    return {} if path is None else {row["checkpoint"]: row for row in read_json(path, format)["results"]}


def _size(path: Path) -> dict[str, str]:
    with open_model(path) as checkpoint:
        parameters = sum(info.numel for info in checkpoint.tensors.values())
        sizes = {
            "parameters": f"{parameters / 1e6:,.2f}M",
            "size": f"{checkpoint.total_bytes / 2**20:,.1f} MiB",
        }
        try:
            return {
                "experts": str(sum(layer.num_experts for layer in checkpoint.require_mixtures())),
                **sizes,
            }
        except UnsupportedModelError:  # a model without experts has sizes all the same
            return sizes


def _scores(result: Mapping[str, Any]) -> dict[str, str]:
    mean = result.get("mean", {})
    return {column: f"{mean[name]:.1f}" for name, column in SCORES.items() if name in mean}


def _speed(result: Mapping[str, Any]) -> dict[str, str]:
    if not result:
        return {}
    timing = result["timings"][0]
    tokens, ratio = timing["tokens_per_second"], timing["speedup"]
    return {
        "tokens/s": f"{tokens['mean']:,.0f} ± {tokens['std']:,.0f}",
        "speed-up": f"{ratio['mean']:.2f} ± {ratio['std']:.2f}",
    }
