"""The decision of a plan for several languages says what a plan for one of them alone keeps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prunecli.methods.experts.plan import ExpertPlan, plan_experts
from prunecli.methods.options import ExpertOptions
from prunecli.model.checkpoint import open_model
from prunecli.results.gates import SUMS, GateStatistics, GateSums
from tests.gates import gate_statistics
from tests.tiny import tiny_nllb_moe

PAIRS = ("eng-fra", "deu-fra", "eng-ces", "deu-ces")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_nllb_moe(tmp_path / "model", experts=8, layers=4)


def statistics(model: Path) -> GateStatistics:
    with open_model(model) as opened:
        layers = opened.require_mixtures()
        generator = np.random.default_rng(0)
        shape = len(layers), 8
        entries = {
            pair: GateSums(
                **{name: generator.integers(1, 50, shape[:1] if name == "tokens" else shape) for name in SUMS}
            )
            for pair in PAIRS
        }
        names = tuple(layer.name for layer in layers)
        return gate_statistics(opened.fingerprint, opened.model_type, "forced", names, 8, 2, entries)


def planned(model: Path, **options: object) -> ExpertPlan:
    with open_model(model) as opened:
        return plan_experts(opened, ExpertOptions(ratio=0.5, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["language", "pair"])
def test_each_language_alone_keeps_what_a_plan_for_it_keeps(model: Path, granularity: str) -> None:
    gates = statistics(model)
    both = planned(
        model, gates=gates, sources=("eng", "deu"), targets=("fra", "ces"), granularity=granularity
    )
    assert both.decision is not None
    seen = 0
    for place in both.decision.places:
        assert place.tokens is not None
        for name, marked in place.alone.items():
            source, target = name.split("-") if "-" in name else (name.split()[-1],) * 2
            pair = {"sources": (source,), "targets": (target,)}
            side = {"encoder": ("sources",), "decoder": ("targets",)}[place.side]
            only = pair if granularity == "pair" else {key: pair[key] for key in side}
            alone = planned(model, gates=gates, granularity=granularity, **only)
            assert tuple(place.ids[marked].tolist()) == tuple(alone.kept[place.name])
            seen += 1
    assert seen == (2 if granularity == "language" else 4) * len(both.decision.places)
    assert any(
        not (marked == place.kept).all() for place in both.decision.places for marked in place.alone.values()
    )


def test_lists_by_language_say_who_names_an_expert(model: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(
        json.dumps({"eng": [0, 1, 9], "deu": [0, 2, 8], "fra": [17, 25, 16, 24]})
    )
    with open_model(model) as opened:
        options = ExpertOptions(keep=tmp_path / "ids.json", sources=("eng", "deu"), targets=("fra",))
        plan = plan_experts(opened, options)
    assert plan.decision is not None
    first = plan.decision.places[0]
    assert first.values is None
    assert first.ids[first.kept].tolist() == [0, 1, 2]
    named = {pair: first.ids[marked].tolist() for pair, marked in first.alone.items()}
    assert named == {"eng-fra": [0, 1], "deu-fra": [0, 2]}
