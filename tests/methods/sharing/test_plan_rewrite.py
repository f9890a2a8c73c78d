"""The tensors of shared FFNs against the reference."""

import numpy as np
import pytest

from prunecli.errors import CheckpointError
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.sharing.plan import plan_ffn
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import summarize
from tests.contracts.method_contract import made_of
from tests.ffn_layouts import ffns_of, tiny, weights, write_copy
from tests.reference import ffn as reference


@pytest.mark.parametrize("case", ["gpt2", "llama"])
@pytest.mark.parametrize("act", [np.tanh, np.square])
def test_a_concatenation_computes_the_sum(case, act):
    """Exactly, whatever the activation: the reference, which results are compared with, does."""
    ffns = [*ffns_of(weights(tiny("source", case)), case).values()]
    rows = np.random.default_rng(1).standard_normal((5, 32))
    made = reference.scaled(reference.concat(ffns), -0.5)
    np.testing.assert_allclose(made(rows, act), -0.5 * sum(ffn(rows, act) for ffn in ffns), rtol=1e-9)


def test_integers_are_not_merged():
    source = tiny("source", "bert")
    held = weights(source)
    held |= {name: value.astype(np.int8) for name, value in held.items() if ".dense." in name}
    quantized = write_copy(source, "int8", held)
    opened = open_model(quantized)
    assert made_of(opened, FfnOptions(preset="No")).structure.removed
    assert made_of(opened, FfnOptions(preset="Shared", init="last")).structure.shared
    with pytest.raises(CheckpointError, match="is of type I8, which cannot be merged"):
        summarize(opened, made_of(opened, FfnOptions(preset="Shared", init="mean")))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers_cannot_be_ranked(value):
    source = tiny("source", "bert")
    held = weights(source)
    held["bert.encoder.layer.1.intermediate.dense.weight"][3, 4] = value
    broken = write_copy(source, "broken", held)
    said = f"layer.0.intermediate.dense.weight holds {value}"
    opened = open_model(broken)
    with pytest.raises(CheckpointError, match=said):
        plan_ffn(opened, FfnOptions(preset="Shared", init="concat", width=10, keep_units="norms"))
