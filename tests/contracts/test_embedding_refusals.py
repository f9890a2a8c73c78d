"""What `factorize-embeddings` refuses, and what a damaged or missing part of its result leads to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prunecli.errors import CheckpointError, UsageError
from prunecli.model.checkpoint import open_model
from tests.contracts.method_contract import load, logits
from tests.factorised import cached, decided, factorised
from tests.families import tiny_family
from tests.ffn_layouts import weights, write_copy
from tests.tiny import config_of

SIDES = ("input", "output", "both")


@pytest.mark.parametrize("side", SIDES)
def test_a_factorised_table(side, tmp_path):
    out = factorised(tiny_family(tmp_path / "source", "nllb-moe"), tmp_path / "out", side=side)
    with open_model(out) as opened, pytest.raises(UsageError, match="is factorised already"):
        decided(opened, side=side, expand_dim=None, depth=None, max_groups=None)


@pytest.mark.parametrize("side", ["output", "both"])
@pytest.mark.parametrize(
    ("model_type", "name"),
    [("bert", "BertForSequenceClassification"), ("llama", "LlamaForSequenceClassification")],
)
def test_a_side_that_the_class_lacks(model_type, name, side, tmp_path):
    source = tiny_family(tmp_path / "source", model_type, architectures=[name])
    with (
        open_model(source) as opened,
        pytest.raises(UsageError, match=f"{name} has no output layer"),
    ):
        decided(opened, side=side)
    out = factorised(source, tmp_path / "out")  # the default is the input's side then
    assert set(config_of(out)["prunecli"]["embedding"]) == {"input"}
    torch.testing.assert_close(logits(cached(out, tmp_path / "cached")), logits(out), rtol=1e-4, atol=1e-5)


def test_the_output_layer_has_no_rows_to_cache(tmp_path):
    with (
        open_model(tiny_family(tmp_path / "source", "bart")) as opened,
        pytest.raises(UsageError, match="`cache` writes the rows of the input's unit"),
    ):
        decided(opened, side="output", cache=True)


def test_a_damaged_structure(tmp_path):
    source = tiny_family(tmp_path / "source", "bart")
    mark = {"version": 1, "embedding": {"input": {"kind": "projective", "map_dim": True}}}
    write_copy(source, tmp_path / "odd", weights(source), prunecli=mark)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "odd")
    assert str(tmp_path / "odd") in str(caught.value)


def test_a_value_that_is_not_finite(tmp_path):
    source = tiny_family(tmp_path / "source", "gpt2")
    held = weights(source)
    held["transformer.wte.weight"][7, 3] = np.nan
    write_copy(source, tmp_path / "odd", held)
    with pytest.raises(CheckpointError, match="row 7 holds a value that is not finite"):
        factorised(tmp_path / "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()
