"""The decision of a plan for several languages says what a plan for one of them alone keeps."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.options import default_balance, smallest_ratio, starved
from prunecli.methods.experts.plan import plan_experts, read_experts
from prunecli.methods.options import ExpertOptions, parse_balance
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import usual_load
from prunecli.model.sparse_layer import Groups
from prunecli.selection.cut import Selection
from prunecli.selection.select import Budget
from tests.gates import random_gates
from tests.selection.test_select import experts
from tests.tiny import random_tensors, tiny_config, tiny_nllb_moe, write_json

PAIRS = ("eng-fra", "deu-fra", "eng-ces", "deu-ces")


@pytest.fixture
def model():
    return tiny_nllb_moe("model", experts=8, layers=4)


def planned(model: Path, **options: object) -> Selection:
    return plan_experts(open_model(model), ExpertOptions(ratio=0.5, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["language", "pair"])
def test_each_language_alone_keeps_what_a_plan_for_it_keeps(model, granularity):
    gates = random_gates(open_model(model), PAIRS)
    both = planned(
        model, gates=gates, sources=("eng", "deu"), targets=("fra", "ces"), granularity=granularity
    )
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
    alone = [(place.kept, marked) for place in both.decision.places for marked in place.alone.values()]
    assert any((marked != kept).any() for kept, marked in alone)


def test_lists_by_language_say_who_names_an_expert(model):
    named = {"eng": [0, 1, 9], "deu": [0, 2, 8], "fra": [17, 25, 16, 24]}
    path = write_json("ids.json", named)
    options = ExpertOptions(keep=path, sources=("eng", "deu"), targets=("fra",))
    plan = plan_experts(open_model(model), options)
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


@pytest.mark.parametrize(
    ("content", "sources", "targets", "encoder", "decoder"),
    [
        ([0, 3, 5, 6], (), (), (0, 3), (1, 2)),
        ({"a": [0, 1, 4, 5], "b": [2, 3, 6, 7]}, ("a",), ("b",), (0, 1), (2, 3)),
        ({"a": [0, 1, 4, 5], "b": [1, 2, 5, 6], "c": [0, 1, 6, 7]}, ("a", "b"), ("c",), (0, 1, 2), (2, 3)),
        ({"a-b": [0, 1, 4, 5], "a-c": [0, 2, 5, 7]}, ("a",), ("b",), (0, 1), (0, 1)),
        ({"a-b": [0, 1, 4, 5], "a-c": [0, 2, 5, 7]}, ("a",), ("b", "c"), (0, 1, 2), (0, 1, 3)),
        ({"a-X": [0, 1, 4, 5], "X-b": [2, 3, 6, 7]}, ("a",), ("b",), (0, 1), (2, 3)),
        ({"format": "prunecli.experts/1", "kept": {NAMES[0]: [3], NAMES[1]: [0]}}, (), (), (3,), (0,)),
        ({"kept": {f"{name}.experts": [3, 1] for name in NAMES}}, (), (), (1, 3), (1, 3)),
        ({"kept": [0, 3, 5, 6], "b": [1, 2, 4, 7]}, ("kept",), ("b",), (0, 3), (0, 3)),  # a language
    ],
)
def test_expert_ids(content, sources, targets, encoder, decoder):
    kept = read_experts(write_json("experts.json", content), AXES, sources, targets)
    assert kept == {AXES[0].name: encoder, AXES[1].name: decoder}


def test_ids_count_the_original_experts_of_a_pruned_model():
    axes = axes_with((1, 3), (0, 2))
    path = write_json("experts.json", [1, 3, 4, 6])
    assert read_experts(path, axes) == {AXES[0].name: (1, 3), AXES[1].name: (0, 2)}
    with pytest.raises(StatisticsError, match=r"keeps expert 0 of model.encoder.layers.1.* does not hold"):
        read_experts(write_json(path, [0, 1, 4, 6]), axes)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({NAMES[0]: [0]}, "selection for another model: model.decoder.layers.1.ffn"),
        ({NAMES[0]: [0], NAMES[1]: [0], "model.layers.1.mlp": [0]}, "model.layers.1.mlp is not in both"),
        ({NAMES[0]: [0], NAMES[1]: [0.5]}, "'model.decoder.layers.1.ffn.experts' is not a list of ids"),
        ({NAMES[0]: [0], NAMES[1]: [4]}, "keeps expert 4 of model.decoder.layers.1.ffn"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(kept, message):
    with pytest.raises(StatisticsError, match=message):
        read_experts(write_json("experts.json", {"kept": kept}), AXES)


LANGUAGES = {"eng_Latn": [0, 1, 4, 5], "fra_Latn": [0, 1, 4, 5]}


@pytest.mark.parametrize(
    ("content", "sources", "targets", "kind", "message"),
    [
        ([0, 8], (), (), StatisticsError, "8 is no expert id; the model's go from 0 to 7"),
        ([0, -1], (), (), StatisticsError, "-1 is no expert id"),
        ([0, True], (), (), StatisticsError, "True is no expert id"),
        ([], (), (), StatisticsError, "no expert ids"),
        ([0, 1], ("a",), (), UsageError, "takes no `sources`"),
        (LANGUAGES, (), (), UsageError, "name `sources` and `targets`"),
        (LANGUAGES, ("eng_Latn",), (), UsageError, "name `sources` and `targets`"),
        (LANGUAGES, ("eng_Lat",), ("fra_Latn",), StatisticsError, "Did you mean eng_Latn"),
        ({"a": 3, "b": [1]}, ("a",), ("b",), StatisticsError, "not a list"),
        ({"format": "prunecli.gates/1", "entries": {}}, (), (), StatisticsError, "go with `gates`"),
    ],
)
def test_expert_files_that_do_not_fit_are_refused(content, sources, targets, kind, message):
    with pytest.raises(kind, match=message):
        read_experts(write_json("experts.json", content), AXES, sources, targets)


@pytest.mark.parametrize("text", ["0:1", "nan:1"])
def test_a_balance_that_is_none_is_refused(text):
    assert parse_balance("3") == 3
    with pytest.raises(UsageError, match="ENCODER:DECODER"):
        parse_balance(text)


@pytest.mark.parametrize(("width", "balance"), [(8, 1), (127, 1), (128, 3)])
def test_the_default_balance_is_the_papers_where_layers_have_as_many_experts(width, balance):
    layers = [
        experts(f"model.{side}.layers.{n}.ffn.experts", side, range(width))
        for side in ("encoder", "decoder")
        for n in range(2)
    ]
    assert default_balance([width] * 4) == balance
    uneven = {layer.name: range(6 if layer.side == "encoder" else 2) for layer in layers}
    said = starved(layers, uneven)
    assert (said is None) == (balance == 3)
    assert said is None or said.startswith(
        f"Decoder layers keep 2 of {width} experts, encoder layers 6 of {width}"
    )
    assert starved(layers, dict.fromkeys(uneven, range(4))) is None
    assert starved(layers[:2], uneven) is None


def can_route(kept_per_group: int, top_k: int, picked: int, at_least: int) -> bool:
    """Whether a router finds `top_k` experts in the `picked` best groups, each scored by its `at_least` best."""
    return kept_per_group >= at_least and kept_per_group * picked >= top_k


@given(st.integers(1, 12), st.integers(1, 8), st.data(), st.sampled_from([1, 2]))
def test_the_fewest_experts_that_a_router_with_groups_can_pick_from(top_k, groups, data, at_least):
    picked = data.draw(st.integers(1, groups))
    found = Groups(groups, picked, at_least).needed(top_k)
    wanted = next(n for n in range(1, 99) if can_route(n, top_k, picked, at_least))
    assert found == wanted * groups


EXPERT = (16 * 32 + 32 + 32 * 16 + 16 + 16) * 4
"""Bytes of one expert of the tiny model in float32: two linear layers, and its row of the router."""


def test_the_parts_are_those_counted_by_hand():
    checkpoint = open_model(tiny_nllb_moe("full", vocab=64))
    load = usual_load(checkpoint, batch=2, beam=3, length=10)
    budget = Budget(balance=Fraction(3), least=2)
    found = smallest_ratio(checkpoint, 10**9, load, budget, dtype=None)
    weights = sum(array.nbytes for array in random_tensors(tiny_config(8, 16, 32, 4, 2, 64)).values())
    assert (found.keep, found.held, found.ratio) == (32, 32, 0.0)
    assert found.expert_bytes == 32 * EXPERT
    assert found.dense_bytes + found.expert_bytes == weights
    hidden = 6 * 10 * 16 * 4  # sequences x tokens x d_model x bytes
    # Keys and values, own and cross, 4 layers and one to reorder.
    assert found.cache_bytes == 2 * 2 * hidden * 5
    assert found.activation_bytes == 2 * 10 * (4 * 16 + 32) * 4 + hidden + 6 * 64 * 3 * 4
    assert found.margin_bytes == 10**8
