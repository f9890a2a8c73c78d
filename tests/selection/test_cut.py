"""Which tensors a smaller checkpoint is made of, compared with what its structure asks for; nothing is written here."""

from collections.abc import Collection
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prunecli.architectures.records import Carrier
from prunecli.errors import UsageError
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.layout import resolve
from prunecli.selection.cut import Selection, cut, kind_of
from prunecli.tensors.stream import check_expressions
from tests.contracts.method_contract import written
from tests.tiny import VOCAB, tiny_nllb_moe

FFNS = tuple(f"model.{side}.layers.{n}.ffn" for side in ("encoder", "decoder") for n in (1, 3))
DENSE = tuple(f"model.{side}.layers.{n}.ffn" for side in ("encoder", "decoder") for n in (0, 2))
ATTENTIONS = (
    *(f"model.encoder.layers.{n}.self_attn" for n in range(4)),
    *(f"model.decoder.layers.{n}.{kind}" for n in range(4) for kind in ("self_attn", "cross_attention")),
)
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
Kept = dict[str, frozenset[int]]
TOKENS = {"tokenizer.json": None}
"""Side files, without which no tokens are cut."""


@pytest.fixture(scope="module")
def model(shared_path):
    return tiny_nllb_moe(shared_path / "full", router_bias=True, shards=2, config=HEADS)


@pytest.fixture(scope="module")
def checkpoint(model):
    return open_model(model)


@pytest.fixture(scope="module")
def units(checkpoint):
    return len(axes_of(checkpoint, "unit")[0].ids)


def some_of(count: int, least: int) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(0, count - 1), min_size=least)


def kept_of(names: Collection[str], units: st.SearchStrategy[frozenset[int]]) -> st.SearchStrategy[Kept]:
    return st.dictionaries(st.sampled_from(sorted(names)), units)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_outputs_are_what_a_model_of_that_structure_stores(data, checkpoint, units):
    """Units of several kinds are cut at once."""
    kept = {
        **data.draw(kept_of([f"{name}.experts" for name in FFNS], some_of(8, 2))),
        **data.draw(kept_of([f"{name}.heads" for name in ATTENTIONS], some_of(4, 0))),
        **data.draw(kept_of([f"{name}.units" for name in DENSE], some_of(units, 1))),
        **data.draw(kept_of(["encoder.layers", "decoder.layers"], some_of(4, 1))),
    }
    reduced = cut(checkpoint, Selection(kept))
    check_expressions(checkpoint, reduced.outputs)
    wanted = resolve(checkpoint.require_architecture(), reduced.config, reduced.structure).shapes
    assert {output.name: output.shape for output in reduced.outputs} == wanted
    assert len(reduced.outputs) == len(wanted)


def test_kinds_at_once_are_kinds_one_after_another(model, units):
    """Byte for byte, in both orders: names of layers in a structure count those that are kept."""
    first = {f"{FFNS[1]}.experts": (1, 4, 6), f"{FFNS[2]}.experts": (0, 7)}
    first |= {f"{ATTENTIONS[3]}.heads": (0, 2), f"{ATTENTIONS[5]}.heads": ()}
    first |= {f"{DENSE[1]}.units": tuple(range(1, units, 2))}
    layers = {"encoder.layers": (0, 2, 3), "decoder.layers": (0, 1)}
    tokens = {"tokens": tuple(range(3, VOCAB))}

    def later(name):  # encoder layer 1 is gone
        for number in (2, 3):
            name = name.replace(f"encoder.layers.{number}.", f"encoder.layers.{number - 1}.")
        return name

    def step(source, kept, name):
        return written(source, Selection(kept, files=TOKENS), name)

    at_once = step(model, {**first, **layers, **tokens}, "at-once")
    units_first = step(step(step(model, first, "units"), tokens, "tokens"), layers, "units-layers")
    renamed = {later(name): ids for name, ids in first.items()}
    layers_first = step(step(model, {**layers, **tokens}, "layers"), renamed, "layers-units")
    for other in (units_first, layers_first):
        for name in ("model.safetensors", "config.json"):
            assert (at_once / name).read_bytes() == (other / name).read_bytes()


@given(
    held=st.integers(1, 6),
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    tail=st.integers(0, 2),
    width=st.integers(1, 4),
    data=st.data(),
)
def test_ranges_take_the_kept_units_of_every_block_and_the_tail(held, blocks, tail, width, data):
    places = sorted(data.draw(some_of(held, 0)))
    axis = list(range((sum(blocks) * held + tail) * width))
    carrier = Carrier(0, blocks, tail)
    ranges = carrier.ranges(places, len(axis), held)
    *parts, end = np.split(axis, np.cumsum(blocks) * held * width)
    wanted = [*chain(*(part.reshape(held, -1)[places].flat for part in parts), end)]
    assert [value for start, stop in ranges for value in axis[start:stop]] == wanted
    assert carrier.length(len(places), len(axis), held) == len(wanted)


@pytest.mark.parametrize(
    ("axis", "ids", "message"),
    [
        ("model.encoder.layers.9.self_attn.heads", (0,), "no such axis"),
        ("model.encoder.layers.0.ffn.experts", (0, 1), "no such axis"),
        (f"{ATTENTIONS[0]}.heads", (0, 4), "there is no head 4"),
        (f"{ATTENTIONS[0]}.heads", (0, -1), "there is no head -1"),
        (f"{FFNS[0]}.experts", (0, 8), "there is no expert 8"),
        (f"{FFNS[0]}.experts", (3,), "would keep 1 experts; the router picks 2"),
        ("encoder.layers", (), "no layer would be left"),
        ("tokens", (), "no token would be left"),
        ("tokens", (0, 10**6), "there is no token 1000000"),
        ("tokens", (0, 1), "their tokenizer"),
    ],
)
def test_what_cannot_be_kept_is_refused(axis, ids, message, model):
    assert kind_of(axis) in ("head", "expert", "layer", "token")
    with pytest.raises(UsageError, match=message):
        cut(open_model(model), Selection({axis: ids}))
