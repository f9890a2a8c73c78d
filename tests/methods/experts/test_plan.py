"""The decision of a plan for several languages says what a plan for one of them alone keeps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.plan import plan_experts, read_experts
from prunecli.methods.options import ExpertOptions
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import open_model
from prunecli.selection.cut import Selection
from tests.gates import random_gates
from tests.tiny import tiny_nllb_moe

PAIRS = ("eng-fra", "deu-fra", "eng-ces", "deu-ces")


@pytest.fixture
def model(tmp_path):
    return tiny_nllb_moe(tmp_path / "model", experts=8, layers=4)


def planned(model: Path, **options: object) -> Selection:
    with open_model(model) as opened:
        return plan_experts(opened, ExpertOptions(ratio=0.5, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["language", "pair"])
def test_each_language_alone_keeps_what_a_plan_for_it_keeps(model, granularity):
    with open_model(model) as opened:
        gates = random_gates(opened, PAIRS)
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


def test_lists_by_language_say_who_names_an_expert(model, tmp_path):
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


NAMES = ("model.encoder.layers.1.ffn", "model.decoder.layers.1.ffn")


def axes_with(encoder: Sequence[int], decoder: Sequence[int]) -> list[Axis]:
    return [
        Axis(f"{name}.experts", "expert", tuple(ids), 4, side)
        for name, side, ids in zip(NAMES, ("encoder", "decoder"), (encoder, decoder), strict=True)
    ]


AXES = axes_with(range(4), range(4))


def save(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "sources", "targets", "encoder", "decoder"),
    [
        ([0, 3, 5, 6], (), (), (0, 3), (1, 2)),
        ({"a": [0, 1, 4, 5], "b": [2, 3, 6, 7]}, ("a",), ("b",), (0, 1), (2, 3)),
        ({"a": [0, 1, 4, 5], "b": [2, 3, 6, 7]}, ("b",), ("a",), (2, 3), (0, 1)),
        ({"a": [0, 1, 4, 5], "b": [1, 2, 5, 6], "c": [0, 1, 6, 7]}, ("a", "b"), ("c",), (0, 1, 2), (2, 3)),
        ({"a-b": [0, 1, 4, 5], "a-c": [0, 2, 5, 7]}, ("a",), ("b",), (0, 1), (0, 1)),
        ({"a-b": [0, 1, 4, 5], "a-c": [0, 2, 5, 7]}, ("a",), ("b", "c"), (0, 1, 2), (0, 1, 3)),
        ({"a-X": [0, 1, 4, 5], "X-b": [2, 3, 6, 7]}, ("a",), ("b",), (0, 1), (2, 3)),
        (
            {"format": "prunecli.experts/1", "kept": {NAMES[0]: [3, 1], NAMES[1]: [0, 2]}},
            (),
            (),
            (1, 3),
            (0, 2),
        ),
        ({"kept": {f"{name}.experts": [3, 1] for name in NAMES}}, (), (), (1, 3), (1, 3)),
        ({"kept": [0, 3, 5, 6], "b": [1, 2, 4, 7]}, ("kept",), ("b",), (0, 3), (0, 3)),  # a language
    ],
)
def test_expert_ids(content, sources, targets, encoder, decoder, tmp_path):
    kept = read_experts(save(tmp_path / "experts.json", content), AXES, sources, targets)
    assert kept == {AXES[0].name: encoder, AXES[1].name: decoder}


def test_ids_count_the_original_experts_of_a_pruned_model(tmp_path):
    axes = axes_with((1, 3), (0, 2))
    path = save(tmp_path / "experts.json", [1, 3, 4, 6])
    assert read_experts(path, axes) == {AXES[0].name: (1, 3), AXES[1].name: (0, 2)}
    with pytest.raises(StatisticsError, match=r"keeps expert 0 of model.encoder.layers.1.* does not hold"):
        read_experts(save(path, [0, 1, 4, 6]), axes)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({NAMES[0]: [0]}, "selection for another model: model.decoder.layers.1.ffn"),
        ({NAMES[0]: [0], NAMES[1]: [0], "model.layers.1.mlp": [0]}, "model.layers.1.mlp is not in both"),
        ({NAMES[0]: [0], NAMES[1]: [0.5]}, "'model.decoder.layers.1.ffn.experts' is not a list of ids"),
        ({NAMES[0]: [0], NAMES[1]: [4]}, "keeps expert 4 of model.decoder.layers.1.ffn"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(kept, message, tmp_path):
    with pytest.raises(StatisticsError, match=message):
        read_experts(save(tmp_path / "experts.json", {"kept": kept}), AXES)


LANGUAGES = {"eng_Latn": [0, 1, 4, 5], "fra_Latn": [0, 1, 4, 5]}


@pytest.mark.parametrize(
    ("content", "sources", "targets", "kind", "message"),
    [
        ([0, 8], (), (), StatisticsError, "8 is no expert id; the model's go from 0 to 7"),
        ([0, -1], (), (), StatisticsError, "-1 is no expert id"),
        ([0, True], (), (), StatisticsError, "True is no expert id"),
        ([0, "1"], (), (), StatisticsError, "no expert id"),
        ([], (), (), StatisticsError, "no expert ids"),
        ([0, 1], ("a",), (), UsageError, "takes no `sources`"),
        (LANGUAGES, (), (), UsageError, "name `sources` and `targets`"),
        (LANGUAGES, ("eng_Latn",), (), UsageError, "name `sources` and `targets`"),
        (LANGUAGES, ("eng_Lat",), ("fra_Latn",), StatisticsError, "Did you mean eng_Latn"),
        ({"a": 3, "b": [1]}, ("a",), ("b",), StatisticsError, "not a list"),
        ({"format": "prunecli.gates/1", "entries": {}}, (), (), StatisticsError, "go with `gates`"),
    ],
)
def test_expert_files_that_do_not_fit_are_refused(content, sources, targets, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        read_experts(save(tmp_path / "experts.json", content), AXES, sources, targets)
