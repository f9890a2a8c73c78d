"""Which tensors a checkpoint with fewer heads is made of, compared with what its structure asks for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prunecli.architectures import FAMILIES
from prunecli.errors import UsageError
from prunecli.methods.heads.plan import HeadPlan
from prunecli.methods.heads.rewrite import head_ranges, rewrite_heads
from prunecli.model.attention import HeadPlaces
from prunecli.model.checkpoint import open_model
from prunecli.model.layout import resolve
from prunecli.tensors.stream import Copy, Slices, check_expressions
from tests.families import tiny_family
from tests.reference.heads import kept_values
from tests.tiny import tiny_nllb_moe

HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
NAMES = (
    *(f"model.encoder.layers.{n}.self_attn" for n in (0, 1)),
    *(f"model.decoder.layers.{n}.{kind}" for n in (0, 1) for kind in ("self_attn", "cross_attention")),
)
LAYER = NAMES[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_nllb_moe(tmp_path_factory.mktemp("model") / "full", layers=2, config=HEADS)


kept_ids = st.lists(st.integers(0, 3), unique=True).map(tuple)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.dictionaries(st.sampled_from(NAMES), kept_ids))
def test_outputs_are_what_a_model_of_that_structure_stores(
    kept: dict[str, tuple[int, ...]], model: Path
) -> None:
    with open_model(model) as checkpoint:
        reduced = rewrite_heads(checkpoint, HeadPlan(kept))
        structure, outputs = reduced.structure, reduced.outputs
        check_expressions(checkpoint, outputs)
        wanted = resolve(checkpoint.require_architecture(), checkpoint.config, structure).shapes
    assert {output.name: output.shape for output in outputs} == wanted
    changed = {name: ids for name, ids in kept.items() if ids != (0, 1, 2, 3)}
    assert dict(structure.heads) == changed
    assert dict(structure.original_heads) == dict.fromkeys(changed, 4)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"nllb-moe"}))
def test_outputs_of_every_family(model_type: str, tmp_path: Path) -> None:
    with open_model(tiny_family(tmp_path / "full", model_type)) as checkpoint:
        family, layers = checkpoint.require_architecture(), checkpoint.layout.attentions
        kept = {layer.name: ids for layer, ids in zip(layers, ((1,), (), (3, 0)), strict=False)}
        reduced = rewrite_heads(checkpoint, HeadPlan(kept))
        structure, outputs = reduced.structure, reduced.outputs
        check_expressions(checkpoint, outputs)
        wanted = resolve(family, checkpoint.config, structure).shapes
    made = {output.name: output.shape for output in outputs if not output.name.startswith(family.extras)}
    assert made == wanted


def test_rows_of_the_inputs_and_columns_of_the_output_go(model: Path) -> None:
    """d_model is 16: four numbers a head."""
    with open_model(model) as checkpoint:
        outputs = rewrite_heads(checkpoint, HeadPlan({LAYER: (0, 2, 3)})).outputs
    made = {output.name: output for output in outputs}
    ranges = ((0, 4), (8, 16))
    for projection in ("q_proj", "k_proj", "v_proj"):
        for name, shape in ((f"{projection}.weight", (12, 16)), (f"{projection}.bias", (12,))):
            assert made[f"{LAYER}.{name}"].expression == Slices(f"{LAYER}.{name}", 0, ranges)
            assert made[f"{LAYER}.{name}"].shape == shape
    weight, bias = (f"{LAYER}.out_proj.{kind}" for kind in ("weight", "bias"))
    assert (made[weight].expression, made[weight].shape) == (Slices(weight, 1, ranges), (16, 12))
    assert made[bias].expression == Copy(bias)
    others = [output for output in outputs if not output.name.startswith(f"{LAYER}.")]
    assert all(output.expression == Copy(output.name) for output in others)


def test_of_a_layer_without_heads_only_the_bias_of_its_output_stays(model: Path) -> None:
    with open_model(model) as checkpoint:
        reduced = rewrite_heads(checkpoint, HeadPlan({LAYER: ()}))
        structure, outputs = reduced.structure, reduced.outputs
    assert [output.name for output in outputs if f"{LAYER}." in output.name] == [f"{LAYER}.out_proj.bias"]
    assert dict(structure.heads) == {LAYER: ()}


@given(
    held=st.integers(1, 6),
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    width=st.integers(1, 4),
    data=st.data(),
)
def test_ranges_take_the_kept_heads_of_every_block(
    held: int, blocks: tuple[int, ...], width: int, data: st.DataObject
) -> None:
    ids = data.draw(st.permutations(range(10, 10 + held)))
    kept = data.draw(st.lists(st.sampled_from(ids), unique=True))
    axis = list(range(sum(blocks) * held * width))
    ranges = head_ranges(HeadPlaces(0, blocks), ids, kept, len(axis))
    places = [ids.index(head) for head in kept]
    wanted = [
        value
        for number, block in enumerate(blocks)
        for start in [sum(blocks[:number]) * held * width]
        for value in kept_values(axis[start : start + block * held * width], held, places)
    ]
    assert [value for start, stop in ranges for value in axis[start:stop]] == wanted
    assert all(stop != start for (_, stop), (start, _) in pairwise(ranges))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"model.encoder.layers.9.self_attn": (0,)}, "not an attention"),
        ({LAYER: (0, 4)}, "has no head 4"),
        ({LAYER: (0, -1)}, "has no head -1"),
        ({LAYER: (1, 1)}, "twice"),
    ],
)
def test_what_cannot_be_kept_is_refused(kept: dict[str, tuple[int, ...]], message: str, model: Path) -> None:
    with open_model(model) as checkpoint, pytest.raises(UsageError, match=message):
        rewrite_heads(checkpoint, HeadPlan(kept))
