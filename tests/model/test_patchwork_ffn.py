"""Shared, removed and resized FFNs are saved and copied as they are stored; layers without heads."""

import copy
import pickle

import numpy as np
import pytest
import torch

from prunecli.architectures.records import FeedForward, Stack, TensorSpec
from prunecli.model.checkpoint import open_model
from prunecli.model.patchwork import NoHeads, Nothing, OnlyBias, remove_ffn
from tests.contracts.method_contract import logits_of
from tests.ffn_layouts import LAYOUTS, OWN_SHAPES, tiny, weights, write_changed
from tests.opening import load

COMPUTED = {"pegasus": {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}}
"""What a model computes at its making, and its class stores all the same."""


@pytest.fixture(params=[*OWN_SHAPES, *COMPUTED])
def case(request):
    return str(request.param)


@pytest.fixture
def source(case):
    return tiny("source", case)


def shared(case: str, owner: int) -> dict[str, dict[str, str]]:
    names = list(LAYOUTS[case].names)
    return {name: {"shared_with": names[owner]} for name in names if name != names[owner]}


def test_saved_as_stored(case, source):
    first, second, *_, last = LAYOUTS[case].names
    changes = {first: {"shared_with": second}, second: {"width": 20}, last: {"removed": True}}
    out = write_changed(source, "out", case, changes)
    model = load(out)
    model.save_pretrained("saved")
    before, after = weights(out), weights("saved")
    assert before.keys() == after.keys() - COMPUTED.get(case, set())
    assert all(np.array_equal(before[name], after[name]) for name in before)
    open_model("saved").check()
    assert torch.equal(logits_of(load("saved")), logits_of(model))


def test_copies_share_and_save(case, source):
    out = write_changed(source, "out", case, shared(case, 1))
    model = load(out)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    one, other, *_ = (f"{name}.{next(iter(LAYOUTS[case].tensors))}" for name in LAYOUTS[case].names)
    assert copied.get_parameter(one) is copied.get_parameter(other)
    assert copied.get_parameter(one) is not model.get_parameter(one)
    copied.save_pretrained("saved")
    assert weights("saved").keys() - COMPUTED.get(case, set()) == weights(out).keys()
    assert torch.equal(logits_of(load("saved")), logits_of(model))


def test_without_heads_only_the_bias_remains():
    stock = torch.nn.Linear(4, 6)
    with torch.no_grad():
        stock.bias.copy_(torch.arange(6.0))
    assert torch.equal(OnlyBias(stock, 6)(torch.ones(2, 3, 4)), torch.arange(6.0).expand(2, 3, 6))
    unbiased = torch.nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
    assert torch.equal(OnlyBias(unbiased, 6)(torch.ones(2, 4)), torch.zeros(2, 6))
    assert torch.equal(NoHeads(unbiased, 8)(torch.ones(2, 3, 6)), torch.zeros(2, 3, 8, dtype=torch.bfloat16))
    assert torch.equal(
        NoHeads(torch.nn.Embedding(5, 8), 2)(torch.ones(3, 4, dtype=torch.long)), torch.zeros(3, 4, 2)
    )
    assert not list(NoHeads(stock, 8).parameters())


def test_an_ffn_goes_whose_layers_the_files_call_otherwise():
    """EXAONE's files call Llama's `mlp.gate_proj` `mlp.c_fc_0`."""
    model = load(tiny("source", "llama"))
    ffn = FeedForward("mlp", "width", (), (TensorSpec("c_fc_0.weight", (), "ffn"),))
    names = {"transformer.h.1.mlp.c_fc_0.weight": "model.layers.1.mlp.gate_proj.weight"}
    stack = Stack("decoder", "transformer.h.{layer}", "depth", (), ffn, ())
    remove_ffn(model, stack, ffn, 1, names.__getitem__)
    assert [type(layer.mlp) is Nothing for layer in model.model.layers][:2] == [False, True]
