"""Quantised weights read as plain ones, against matrices made value by value and against transformers."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.dequantised import as_run
from tests.opening import load
from tests.quantising import quantise
from tests.reference.quantisation import SCHEMES, Quantised, float8, gptq, mxfp4
from tests.stock_mixtures import tiny_mixture
from tests.tiny import change_config, config_of

MATRIX = "model.layers.0.mlp.up_proj"
CONFIG = {"model_type": "none", "dtype": "float32"}
DENSE = [*SCHEMES, "mxfp4"]


def write(directory: Path, made: Quantised, method: dict[str, Any], name: str = f"{MATRIX}.") -> Checkpoint:
    tensors = {f"{name}{part}": tensor.contiguous() for part, tensor in made.parts.items()}
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": method}))
    return open_model(directory)


def make(scheme: str) -> tuple[Quantised, dict[str, Any], str, str]:
    """A matrix, what config.json says, what its tensors' names begin with, its own name."""
    if scheme == "mxfp4":
        return mxfp4((3, 64, 10)), {"quant_method": "mxfp4"}, f"{MATRIX}_", MATRIX
    quantised, method = SCHEMES[scheme]
    made = quantised(torch.randn(24, 64, generator=torch.Generator().manual_seed(3)))
    return made, method, f"{MATRIX}.", f"{MATRIX}.weight"


def values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return torch.from_numpy(checkpoint.read(name).astype(np.float32))


@pytest.mark.parametrize("scheme", DENSE)
def test_every_scheme(scheme, tmp_path):
    made, method, beginning, name = make(scheme)
    with write(tmp_path, made, method, beginning) as stored:
        run = as_run(stored, torch.float32)
        assert set(run.tensors) == {name, "model.norm.weight"}
        assert run.info(name).shape == tuple(made.values.shape)
        assert torch.equal(values(run, name), made.values)
        assert torch.equal(values(run, "model.norm.weight"), torch.ones(3))
        half = as_run(stored, torch.bfloat16)
        assert half.info(name).dtype == "BF16"
        assert torch.equal(values(half, name), made.values.bfloat16().float())
        assert run.fingerprint == stored.fingerprint
        assert run.stored_bytes(name) == stored.total_bytes - 12
        assert stored.unquantised[name].shape == tuple(made.values.shape)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(DENSE), st.data())
def test_any_range_is_that_of_the_whole(scheme, data):
    made, method, beginning, name = make(scheme)
    whole = made.values.reshape(-1)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    with (
        tempfile.TemporaryDirectory() as folder,
        write(Path(folder), made, method, beginning) as stored,
    ):
        run = as_run(stored, torch.float32)
        read = run.read_range(name, 4 * start, bytearray(4 * (stop - start)))
        assert np.array_equal(np.frombuffer(read, np.float32), whole[start:stop].numpy())


def test_rows_and_columns_that_blocks_do_not_divide(tmp_path):
    made = float8(torch.randn(21, 37, generator=torch.Generator().manual_seed(1)), (8, 16))
    method = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    with write(tmp_path, made, method) as stored:
        assert torch.equal(values(as_run(stored, torch.float32), f"{MATRIX}.weight"), made.values)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_every_float_of_eight_bits(kind, tmp_path):
    weight = torch.arange(256).to(torch.uint8).view(kind).reshape(16, 16)
    made = Quantised(
        {"weight": weight, "weight_scale_inv": torch.full((1, 1), 0.75)}, weight.float() * torch.tensor(0.75)
    )
    method = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    with write(tmp_path, made, method) as source:
        read = values(as_run(source, torch.float32), f"{MATRIX}.weight")
    torch.testing.assert_close(read, made.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(read.signbit() & ~read.isnan(), made.values.signbit() & ~made.values.isnan())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "weight_scale_inv holds a scale that is no number"),
        (float("inf"), "is no number"),
        (0.0, "weight_scale_inv holds a scale of 0 where values are not"),
    ],
)
def test_scales_that_cannot_be(value, message, tmp_path):
    made, method, _, name = make("fp8")
    made.parts["weight_scale_inv"][1, 2] = value
    with write(tmp_path, made, method) as stored, pytest.raises(CheckpointError, match=message):
        as_run(stored, torch.float32).read(name)


def test_a_column_of_a_group_that_there_is_none_of(tmp_path):
    made = gptq(torch.zeros(8, 64), 16)
    made.parts["g_idx"][5] = 4
    with (
        write(tmp_path, made, SCHEMES["gptq"][1]) as stored,
        pytest.raises(CheckpointError, match="a column is of group 4, of 4"),
    ):
        as_run(stored, torch.float32).read(f"{MATRIX}.weight")


def is_expert(name: str) -> bool:
    return ".experts." in name and "bias" not in name


@pytest.mark.parametrize(
    ("model_type", "scheme", "sizes"),
    [("gpt_oss", "mxfp4", {"intermediate_size": 32}), ("deepseek_v3", "fp8", {"moe_intermediate_size": 32})],
)
def test_as_transformers_reads_them(model_type, scheme, sizes, tmp_path):
    if scheme == "mxfp4":
        pytest.importorskip("transformers", minversion="5.23")  # earlier ones decode it to bfloat16
    model = tiny_mixture(model_type, hidden_size=32, **sizes)
    model.save_pretrained(tmp_path / "source")
    quantise(tmp_path / "source", tmp_path / "stored", tmp_path / "plain", scheme, is_expert)
    blocks = {"weight_block_size": (16, 16), "modules_to_not_convert": ["self_attn", "gate", "lm_head"]}
    how = (
        transformers.Mxfp4Config(dequantize=True)
        if scheme == "mxfp4"
        else transformers.FineGrainedFP8Config(dequantize=True, **blocks)
    )
    theirs = (
        type(model).from_pretrained(tmp_path / "stored", quantization_config=how, dtype=torch.float32).eval()
    )
    ours = load(tmp_path / "stored")
    held = theirs.state_dict()
    assert ours.state_dict().keys() == held.keys()
    assert all(torch.equal(tensor, held[name]) for name, tensor in ours.state_dict().items())
    ids = torch.arange(3, 19)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    ours.save_pretrained(tmp_path / "saved")  # what is saved is plain, and says so
    assert "quantization_config" not in config_of(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(again(ids).logits, theirs(ids).logits)
    assert any(".experts." in name for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_a_table_and_an_output_that_are_said_to_be_one_and_differ(tmp_path):
    tiny_mixture("qwen3_moe", moe_intermediate_size=32).save_pretrained(tmp_path / "plain")
    quantise(
        tmp_path / "plain", tmp_path / "fp8", tmp_path / "values", "fp8", lambda name: ".experts." in name
    )
    change_config(tmp_path / "fp8", tie_word_embeddings=True)
    stored = open_model(tmp_path / "fp8")
    assert {*as_run(stored, torch.float32).tensors} == {*stored.tensors} - {
        part for weight in stored.quantised.values() for part in weight.parts.values()
    } | {*stored.quantised}


def test_experts_of_another_width_than_config_json_says(tmp_path):
    tiny_mixture("qwen3_moe", moe_intermediate_size=32).save_pretrained(tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "fp8", tmp_path / "values", "fp8", is_expert)
    change_config(tmp_path / "fp8", moe_intermediate_size=48)
    with pytest.raises(CheckpointError, match="have 64 rows, the model wants 96"):
        load(tmp_path / "fp8")
