"""Shared, removed and resized FFNs are saved, copied and trained as they are stored."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.model.checkpoint import open_model
from tests.contracts.method_contract import load, logits_of
from tests.families.family import FfnLayout
from tests.ffn_layouts import LAYOUTS, OWN_SHAPES, tiny, weights, write_changed

COMPUTED = {"pegasus": {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}}
"""What a model computes at its making, and its class stores all the same."""


@pytest.fixture(params=[*OWN_SHAPES, *COMPUTED])
def case(request):
    return str(request.param)


@pytest.fixture
def source(case, tmp_path):
    return tiny(tmp_path / "source", case)


@contextmanager
def without_ffn(model: Any, layout: FfnLayout, names: list[str]) -> Iterator[None]:
    """Within the block the stock model passes these FFNs by: h + FFN(LN(h)) and LN(h + FFN(h)) become h."""
    with ExitStack() as hooks:
        for name in names:
            if not layout.post_norm:
                silent = model.get_submodule(f"{name}.{layout.output}").register_forward_hook(
                    lambda _module, _inputs, result: torch.zeros_like(result)
                )
                hooks.callback(silent.remove)
                continue
            held: list[torch.Tensor] = []
            keep = model.get_submodule(f"{name}.{layout.input}").register_forward_pre_hook(
                lambda _module, inputs, held=held: held.append(inputs[0])
            )
            give = model.get_submodule(layout.names[name]).register_forward_hook(
                lambda _module, _inputs, _result, held=held: held.pop()
            )
            hooks.callback(keep.remove)
            hooks.callback(give.remove)
        yield


def shared(case: str, owner: int) -> dict[str, dict[str, str]]:
    names = list(LAYOUTS[case].names)
    return {name: {"shared_with": names[owner]} for name in names if name != names[owner]}


def test_saved_as_stored(case, source, tmp_path):
    first, second, *_, last = LAYOUTS[case].names
    changes = {first: {"shared_with": second}, second: {"width": 20}, last: {"removed": True}}
    out = write_changed(source, tmp_path / "out", case, changes)
    model = load(out)
    model.save_pretrained(tmp_path / "saved")
    before, after = weights(out), weights(tmp_path / "saved")
    assert before.keys() == after.keys() - COMPUTED.get(case, set())
    assert all(np.array_equal(before[name], after[name]) for name in before)
    with open_model(tmp_path / "saved") as made:
        made.check()
    assert torch.equal(logits_of(load(tmp_path / "saved")), logits_of(model))


def test_copies_share_and_save(case, source, tmp_path):
    out = write_changed(source, tmp_path / "out", case, shared(case, 1))
    model = load(out)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    one, other, *_ = (f"{name}.{next(iter(LAYOUTS[case].tensors))}" for name in LAYOUTS[case].names)
    assert copied.get_parameter(one) is copied.get_parameter(other)
    assert copied.get_parameter(one) is not model.get_parameter(one)
    copied.save_pretrained(tmp_path / "saved")
    assert weights(tmp_path / "saved").keys() - COMPUTED.get(case, set()) == weights(out).keys()
    assert torch.equal(logits_of(load(tmp_path / "saved")), logits_of(model))


def test_training_moves_all_that_share(case, source, tmp_path):
    first, second, *_, last = LAYOUTS[case].names
    changes = {second: {"shared_with": first}, last: {"removed": True}}
    model = load(write_changed(source, tmp_path / "out", case, changes)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[5, 9, 12, 2], [7, 8, 2, 2]])
    torch.manual_seed(0)  # M2M100 skips layers at random when it trains
    targets = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    model(input_ids=ids, **targets).logits.float().logsumexp(-1).sum().backward()
    suffix = next(iter(LAYOUTS[case].tensors))
    before = model.get_parameter(f"{first}.{suffix}").detach().clone()
    optimizer.step()
    assert torch.equal(model.get_parameter(f"{first}.{suffix}"), model.get_parameter(f"{second}.{suffix}"))
    assert not torch.equal(model.get_parameter(f"{first}.{suffix}"), before)
    model.save_pretrained(tmp_path / "trained")
    assert torch.equal(logits_of(load(tmp_path / "trained")), logits_of(model.eval()))
