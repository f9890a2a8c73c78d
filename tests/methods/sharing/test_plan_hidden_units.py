"""Which hidden units matter: norms against the reference, on the FFN that each initialisation makes."""

from __future__ import annotations

import numpy as np
import pytest

from prunecli.errors import CheckpointError
from prunecli.methods.sharing.arrange import Group
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.sharing.plan import plan_ffn, unit_norms
from prunecli.model.checkpoint import open_model
from prunecli.tensors import computing
from tests.ffn_layouts import LAYOUTS, tiny, weights, write_copy
from tests.reference import ffn as reference


@pytest.mark.parametrize(
    ("case", "init"), [("m2m_100", "mean"), ("t5-gated", "first"), ("gpt2", "mean"), ("llama", "concat")]
)
def test_norms(case, init, tmp_path, monkeypatch):
    monkeypatch.setattr(computing, "BLOCK_ELEMENTS", 100)
    layout, source = LAYOUTS[case], tiny(tmp_path / "source", case)
    held, names = weights(source), tuple(layout.names)[:2]
    ffns = [
        reference.read({suffix: held[f"{name}.{suffix}"] for suffix in layout.tensors}, layout.tensors)
        for name in names
    ]
    merged = {"first": ffns[0], "mean": reference.mean(ffns), "concat": reference.concat(ffns)}[init]
    expected = [
        np.prod([np.linalg.norm(vector) for vector in (*unit.inputs, unit.output)]) for unit in merged.units
    ]
    with open_model(source) as opened:
        layers = {layer.name: layer for layer in opened.layout.ffns}
        group = Group(names, names[:1] if init == "first" else names, init, len(expected), 10)
        found = unit_norms(opened, layers, group)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_cannot_be_ranked(tmp_path, value):
    source = tiny(tmp_path / "source", "bert")
    held = weights(source)
    held["bert.encoder.layer.1.intermediate.dense.weight"][3, 4] = value
    broken = write_copy(source, tmp_path / "broken", held)
    with (
        open_model(broken) as opened,
        pytest.raises(CheckpointError, match=f"layer.0.intermediate.dense.weight holds {value}"),
    ):
        plan_ffn(opened, FfnOptions(preset="Shared", init="concat", width=10, keep_units="norms"))
