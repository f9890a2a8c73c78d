"""languages.json: shared experts, clusters of languages, experts that each layer keeps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

from prunecli.results.tables.rows import Row, Tables

SIDES = ("encoder", "decoder")


def tables(payload: Mapping[str, Any]) -> Tables:
    """`relations`, `similarity` (each two pairs once), `clusters` (as they join) and `experts_per_layer`."""
    similarity, layers = payload["similarity"], payload["experts_per_layer"]
    return {
        "relations": [] if similarity is None else _relations(similarity["relations"]),
        "similarity": [] if similarity is None else _similarity(payload["pairs"], similarity),
        "clusters": [row for side in SIDES for row in _clusters(side, payload["clustering"][side])],
        "experts_per_layer": [] if layers is None else _layers(layers),
    }


def _relations(relations: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    return [
        {
            "side": side,
            "pairs_with": relation,
            "compared": spread["comparisons"],
            "jaccard_mean": spread["mean"],
            "jaccard_lowest": spread["lowest"],
            "jaccard_highest": spread["highest"],
        }
        for side, by_relation in relations.items()
        for relation, spread in by_relation.items()
        if spread is not None
    ]


def _similarity(pairs: list[str], similarity: Mapping[str, Any]) -> list[Row]:
    return [
        {
            "first_pair": pairs[one],
            "second_pair": pairs[other],
            **{f"{side}_jaccard": similarity[side][one][other] for side in SIDES},
        }
        for one, other in combinations(range(len(pairs)), 2)
    ]


def _clusters(side: str, tree: Mapping[str, Any] | None) -> list[Row]:
    """Each two clusters that join, by the languages in them."""
    if tree is None:
        return []
    members = [[language] for language in tree["languages"]]
    rows: list[Row] = []
    for first, second, distance, _ in tree["matrix"]:
        one, other = members[int(first)], members[int(second)]
        rows.append({"side": side, "first": " ".join(one), "second": " ".join(other), "distance": distance})
        members.append([*one, *other])
    return rows


def _layers(found: Mapping[str, Any]) -> list[Row]:
    keys = {"layers": "layer", "sides": "side", "mean": "experts_mean"}
    keys |= {"lowest": "experts_lowest", "highest": "experts_highest"}
    columns = [found[key] for key in keys]
    return [dict(zip(keys.values(), values, strict=True)) for values in zip(*columns, strict=True)]
