"""The FFNs of a checkpoint, as found from its record, config and structure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.architectures import FAMILIES
from prunecli.errors import CheckpointError
from prunecli.model.changes import FfnChange
from prunecli.model.checkpoint import open_model
from prunecli.model.ffn import FfnLayer, describe_ffns
from prunecli.model.inventory import take_inventory
from prunecli.model.layout import resolve
from prunecli.model.structure import Structure
from prunecli.results.inspection import Inspection
from tests.families import tiny_config_of
from tests.ffn_layouts import LAYOUTS, tiny, weights, write_changed
from tests.tiny import tiny_nllb_moe

ENCODER = [f"model.encoder.layers.{number}" for number in range(3)]
DECODER = [f"model.decoder.layers.{number}" for number in range(2)]
FC = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1, "fc2.bias": None}
REMOVED = FfnChange(removed=True)


def layers_of(model_type: str, changes: dict[str, FfnChange], **config: Any) -> dict[str, FfnLayer]:
    structure = Structure().changing_ffn(changes)
    found = resolve(FAMILIES[model_type], tiny_config_of(model_type, **config), structure).ffns
    return {layer.name: layer for layer in found}


@pytest.mark.parametrize("case", LAYOUTS)
class TestLayers:
    def test_of_a_stock_model(self, case: str, tmp_path: Path) -> None:
        layout = LAYOUTS[case]
        with open_model(tiny(tmp_path / "source", case)) as checkpoint:
            layers = [layer for layer in checkpoint.layout.ffns if not layer.is_sparse]
            assert [layer.name for layer in layers] == list(layout.names)
            for layer in layers:
                assert layer.tensors == layout.tensors
                assert layer.norm_tensors
                assert all(name.startswith(layout.norms(layer.name)) for name in layer.norm_tensors)
                assert {*layer.tensor_names, *layer.norm_tensors} <= set(checkpoint.tensors)
                assert (layer.owner, layer.removed, layer.is_shared) == (layer.name, False, False)
                for suffix, axis in layer.tensors.items():
                    shape = checkpoint.tensors[f"{layer.prefix}{suffix}"].shape
                    assert axis is None or shape[axis] == layer.width * layer.blocks[suffix]


def test_a_mixture_of_experts_is_named_but_has_no_tensors_here(tmp_path: Path) -> None:
    with open_model(tiny_nllb_moe(tmp_path / "tiny")) as checkpoint:
        layers = checkpoint.layout.ffns
    assert [(layer.side, layer.layer, layer.is_sparse) for layer in layers] == [
        (side, number, number % 2 == 1) for side in ("encoder", "decoder") for number in range(4)
    ]
    assert {(layer.width, bool(layer.tensors)) for layer in layers if layer.is_sparse} == {(32, False)}


def test_a_gated_ffn_with_biases() -> None:
    layers = layers_of("llama", {}, mlp_bias=True)
    assert layers["model.layers.1.mlp"].tensors == {
        "gate_proj.weight": 0,
        "gate_proj.bias": 0,
        "up_proj.weight": 0,
        "up_proj.bias": 0,
        "down_proj.weight": 1,
        "down_proj.bias": None,
    }


def test_across_stacks_the_owner_says_the_width() -> None:
    layers = layers_of("bart", {DECODER[0]: FfnChange(ENCODER[1])})
    assert {name: layer.width for name, layer in layers.items()} == {
        **dict.fromkeys(ENCODER, 48),
        DECODER[0]: 48,
        DECODER[1]: 40,
    }
    assert layers[DECODER[0]].prefix == f"{ENCODER[1]}."
    assert layers[DECODER[0]].tensors == FC


@st.composite
def structures(draw: st.DrawFn) -> dict[str, FfnChange]:
    """Any of bart's FFNs removed, shared with one that is neither, or of another width."""
    names = [*ENCODER, *DECODER]
    owners = draw(st.lists(st.sampled_from(names), unique=True))
    changes = {}
    for name in names:
        if name in owners:
            width = draw(st.none() | st.integers(1, 100))
            changes |= {} if width is None else {name: FfnChange(width=width)}
        else:
            others = [REMOVED, *map(FfnChange, owners)]
            changes[name] = draw(st.sampled_from(others))
    return changes


@given(changes=structures())
def test_whatever_is_shared_or_removed_is_counted_once_or_not_at_all(changes: dict[str, FfnChange]) -> None:
    config, family = tiny_config_of("bart"), FAMILIES["bart"]
    structure = Structure.from_json(json.loads(json.dumps(Structure().changing_ffn(changes).to_json())))
    shapes = resolve(family, config, structure).shapes
    stored = sum(math.prod(shape) for name, shape in shapes.items() if ".fc1." in name or ".fc2." in name)
    norms = sum(name.endswith("final_layer_norm.weight") for name in shapes)
    expected = 0
    for name in (*ENCODER, *DECODER):
        change = changes.get(name, FfnChange())
        if change.shared_with is None and not change.removed:
            width = change.width or (48 if name in ENCODER else 40)
            expected += 2 * 32 * width + width + 32
    assert stored == expected
    assert norms == 5 - sum(change.removed for change in changes.values())
    layers = resolve(family, config, structure).ffns
    assert [layer.owner for layer in layers] == [
        changes.get(layer.name, FfnChange()).shared_with or layer.name for layer in layers
    ]
    assert bool(describe_ffns(layers, structure.ffn)) == bool(changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.encoder.layers.3": REMOVED}, r"names model\.encoder\.layers\.3, which is no FFN"),
        ({"model.encoder.layers.0.fc1": REMOVED}, "which is no FFN"),
        ({ENCODER[0]: FfnChange("model.layers.0")}, r"names model\.layers\.0, which is no FFN"),
        ({ENCODER[0]: FfnChange(ENCODER[0])}, "shares its FFN with itself"),
        ({ENCODER[0]: FfnChange(ENCODER[1]), ENCODER[1]: FfnChange(ENCODER[2])}, "1, which is shared"),
        ({ENCODER[0]: FfnChange(ENCODER[1]), ENCODER[1]: FfnChange(ENCODER[0])}, "which is shared"),
        ({DECODER[0]: FfnChange(ENCODER[1]), ENCODER[1]: REMOVED}, r"layers\.1, which is removed"),
    ],
)
def test_what_cannot_be(changes: dict[str, FfnChange], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        layers_of("bart", changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.encoder.layers.1.ffn": REMOVED},
        {"model.encoder.layers.1.ffn": FfnChange("model.encoder.layers.3.ffn")},
        {"model.encoder.layers.0.ffn": FfnChange("model.encoder.layers.3.ffn")},
        {"model.encoder.layers.3.ffn": FfnChange(width=8)},
    ],
)
def test_a_mixture_of_experts_stays(tmp_path: Path, changes: dict[str, FfnChange]) -> None:
    structure = Structure().changing_ffn(changes).to_json()
    with (
        open_model(tiny_nllb_moe(tmp_path / "tiny", config={"prunecli": structure})) as checkpoint,
        pytest.raises(CheckpointError, match=r"tiny: config.json changes .*: a mixture of experts can be"),
    ):
        checkpoint.layout.ffns


class TestDescription:
    def said(self, changes: dict[str, FfnChange]) -> str:
        return describe_ffns(tuple(layers_of("bart", changes).values()), changes)

    def test_of_a_stock_model(self) -> None:
        assert self.said({}) == ""

    def test_as_in_the_paper(self) -> None:
        changes = {
            ENCODER[0]: FfnChange(width=49152),
            **{name: FfnChange(ENCODER[0]) for name in ENCODER[1:]},
            **dict.fromkeys(DECODER, REMOVED),
        }
        assert self.said(changes) == (
            "encoder 0 of width 49,152; encoder 1-2 share layer 0's; decoder 0-1 removed"
        )

    def test_across_stacks_and_with_gaps(self) -> None:
        changes = {
            ENCODER[0]: FfnChange(ENCODER[1]),
            ENCODER[2]: FfnChange(ENCODER[1]),
            DECODER[1]: FfnChange(ENCODER[1]),
        }
        assert self.said(changes) == "encoder 0, 2 share layer 1's; decoder 1 shares encoder 1's"


def test_the_inventory_counts_what_is_stored(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", "bart")
    changes = {ENCODER[1]: {"shared_with": ENCODER[0]}, DECODER[1]: {"removed": True}}
    with open_model(write_changed(source, tmp_path / "out", "bart", changes)) as checkpoint:
        found = Inspection.of(checkpoint, take_inventory(checkpoint)).to_json()
    # of five FFNs of 32 x 48 + 48 + 48 x 32 + 32 parameters three are stored
    assert found["parts"]["ffn"]["parameters"] == 3 * (2 * 32 * 48 + 48 + 32)
    assert found["total"]["parameters"] == sum(value.size for value in weights(tmp_path / "out").values())
    assert [ffn["shared_with"] for ffn in found["ffns"]] == [None, ENCODER[0], None, None, None]
    assert [ffn["removed"] for ffn in found["ffns"]] == [False, False, False, False, True]
    assert [ffn["width"] for ffn in found["ffns"]] == [48, 48, 48, 48, 0]


CHANGES = {"a": FfnChange("b"), "b": FfnChange(width=7), "c": FfnChange(removed=True)}


class TestStructure:
    def test_json_and_back(self) -> None:
        value = Structure().changing_ffn(CHANGES).to_json()
        assert value["ffn"] == {"a": {"shared_with": "b"}, "b": {"width": 7}, "c": {"removed": True}}
        assert Structure.from_json(json.loads(json.dumps(value))).ffn == CHANGES

    def test_a_structure_without_any_reads_as_stock(self) -> None:
        assert Structure.from_json({"version": 1}).is_stock
        assert not Structure(ffn=CHANGES).is_stock

    def test_later_changes_replace_earlier_ones(self) -> None:
        structure = Structure().changing_ffn(CHANGES)
        changed = structure.changing_ffn({"a": FfnChange(removed=True), "b": FfnChange()})
        assert changed.ffn == {"a": FfnChange(removed=True), "c": FfnChange(removed=True)}

    @pytest.mark.parametrize(
        "value",
        [
            {"shared_with": "b", "removed": True},
            {"shared_with": "b", "width": 3},
            {"removed": True, "width": 3},
            {"width": 0},
            {"width": 2.5},
            {"width": True},
            {"removed": 1},
            {"shared_with": 3},
            {"halved": True},
            [],
            None,
        ],
        ids=str,
    )
    def test_damaged_json(self, value: Any) -> None:
        with pytest.raises(CheckpointError, match="damaged"):
            Structure.from_json({"version": 1, "ffn": {"a": value}})
