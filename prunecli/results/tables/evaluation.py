"""evaluation.json: scores by pair, by source, by target, by group, and their means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunecli.results.tables.rows import Row, Tables, picked, scalars

MODEL = ("dtype", "parameters", "checkpoint_bytes", "context", "stride")


def tables(payload: Mapping[str, Any]) -> Tables:
    """translation: `pairs`, `mean`, `by_source`, `by_target`, `by_group`; else `scores` and `f1_by_class`."""
    return _translation(payload) if payload["task"] == "translation" else _other(payload)


def _translation(payload: Mapping[str, Any]) -> Tables:
    found: Tables = {"pairs": [], "mean": [], "by_source": [], "by_target": [], "by_group": []}
    for result in payload["results"]:
        name = {"checkpoint": result["checkpoint"]}
        for pair, scores in result["pairs"].items():
            source, _, target = pair.partition("-")
            found["pairs"].append({**name, "source": source, "target": target, **_scores(scores)})
        found["mean"].append(
            {**name, **picked(result, MODEL), "pairs": len(result["pairs"]), **_scores(result["mean"])}
        )
        for side in ("source", "target"):
            for language, scores in result.get(f"by_{side}", {}).items():
                found[f"by_{side}"].append({**name, side: language, **_scores(scores)})
        for scores in result.get("by_group", ()):
            groups = {"source_group": scores["source"], "target_group": scores["target"]}
            others = {key: value for key, value in scores.items() if key not in ("source", "target")}
            found["by_group"].append({**name, **groups, **_scores(others)})
    return found


def _scores(scores: Mapping[str, Any]) -> Row:
    """The scores, then what the significance test says of each."""
    row = scalars(scores)
    for metric, test in scores.get("bootstrap", {}).items():
        row[f"{metric}_p_value"] = test.get("p_value")
        row |= {f"{metric}_bootstrap_mean": test["mean"], f"{metric}_bootstrap_ci95": test["ci95"]}
    for metric, counts in scores.get("significant", {}).items():
        row |= {f"{metric}_pairs_worse": counts["worse"], f"{metric}_pairs_better": counts["better"]}
    return row


def _other(payload: Mapping[str, Any]) -> Tables:
    found: Tables = {"scores": [], "f1_by_class": []}
    for result in payload["results"]:
        name = {"checkpoint": result["checkpoint"]}
        found["scores"].append(
            {**name, **picked(result, MODEL), **scalars(result["scores"]), **picked(result, ("p_value",))}
        )
        by_class = result["scores"].get("f1_by_class", {})
        found["f1_by_class"] += [{**name, "class": label, "f1": value} for label, value in by_class.items()]
    return found
