import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.model.checkpoint import open_model
from tests.tiny import config_of, random_tensors, tiny_nllb_moe, write_json, write_weights

FORMS = (
    {},
    {"shards": 3},
    {"dtype": "F16", "router_bias": True},
    {"dtype": "BF16"},
    {"pickled": True, "shards": 2, "dtype": "BF16"},
)


@pytest.fixture
def tiny():
    return tiny_nllb_moe("model")


@pytest.fixture
def sharded():
    return tiny_nllb_moe("model", shards=3)


def weights(directory: Path, tensors: dict[str, np.ndarray], **options: Any) -> Path:
    """`directory` with other weights."""
    for path in (*directory.glob("*.safetensors*"), *directory.glob("*.bin*")):
        path.unlink()
    write_weights(directory, tensors, **options)
    return directory


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_names_types_shapes_and_bytes_are_the_stored_ones(form):
    directory = tiny_nllb_moe("model", **form)
    stored = random_tensors(config_of(directory), dtype=form.get("dtype", "F32"))
    checkpoint = open_model(directory)
    assert set(checkpoint.tensors) == set(stored)
    for name, expected in stored.items():
        info, values = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.name, info.shape, info.nbytes) == (name, expected.shape, expected.nbytes)
        assert values.dtype == expected.dtype
        assert values.tobytes() == expected.tobytes()
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert len(checkpoint.files) == form.get("shards", 1)


def test_a_range_of_bytes(tiny):
    name = "model.shared.weight"
    checkpoint = open_model(tiny)
    whole = checkpoint.read(name).tobytes()
    buffer = bytearray(20)
    assert checkpoint.read_range(name, 10, buffer) == buffer == whole[10:30]
    assert checkpoint.read_range(name, 5, bytearray()) == b""
    with pytest.raises(ValueError, match="were asked for"):
        checkpoint.read_range(name, 0, bytearray(len(whole) + 1))


def test_no_torch_on_the_way_to_safetensors(tiny):
    code = (
        "import sys; from prunecli.model.checkpoint import open_model\n"
        "checkpoint = open_model(sys.argv[1]); checkpoint.fingerprint\n"
        "sys.exit(bool({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tiny)], check=False).returncode == 0


def test_an_undeclared_family_opens_but_is_not_treated():
    directory = tiny_nllb_moe("model", config={"model_type": "other-kind"})
    checkpoint = open_model(directory)
    assert checkpoint.family is None
    assert "model.shared.weight" in checkpoint.tensors
    with pytest.raises(UnsupportedModelError, match=r'"other-kind" is unknown here'):
        checkpoint.require_architecture()


@pytest.mark.parametrize("pickled", [False, True])
def test_equal_aliases_and_buffers_are_left_out(tiny, pickled):
    stored = random_tensors(config_of(tiny))
    extra = {
        "lm_head.weight": stored["model.shared.weight"],
        "model.decoder.embed_tokens.weight": stored["model.shared.weight"],
        "model.encoder.embed_positions.weights": np.zeros((4, 16), np.float32),
    }
    assert set(open_model(weights(tiny, {**extra, **stored}, pickled=pickled)).tensors) == set(stored)


def test_an_alias_with_other_values_is_kept(tiny):
    stored = random_tensors(config_of(tiny))
    other = {**stored, "lm_head.weight": stored["model.shared.weight"] + 1}
    assert set(open_model(weights(tiny, other)).tensors) == set(other)


def test_a_lone_alias_gets_the_stored_name(tiny):
    stored = random_tensors(config_of(tiny))
    renamed = {name.replace("model.shared", "lm_head"): value for name, value in stored.items()}
    checkpoint = open_model(weights(tiny, renamed))
    assert set(checkpoint.tensors) == set(stored)
    assert np.array_equal(checkpoint.read("model.shared.weight"), stored["model.shared.weight"])


def test_every_fault_of_tensors_is_named(tiny):
    tensors = random_tensors(config_of(tiny))
    del tensors["model.encoder.layer_norm.bias"]
    tensors["model.stray.weight"] = np.zeros(3, np.float32)
    tensors["model.decoder.layer_norm.bias"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError) as caught:
        open_model(weights(tiny, tensors)).check()
    assert "1 missing (model.encoder.layer_norm.bias)" in caught.value.message
    assert "1 unexpected (model.stray.weight)" in caught.value.message
    assert "1 misshapen (model.decoder.layer_norm.bias [3] instead of [16])" in caught.value.message


def test_names_of_the_base_model_get_their_prefix(tiny):
    stored = random_tensors(config_of(tiny))
    bare = {name.removeprefix("model."): value for name, value in stored.items()}
    bare["decoder.embed_tokens.weight"] = bare["shared.weight"]
    checkpoint = open_model(weights(tiny, bare))
    assert set(checkpoint.tensors) == set(stored)
    found = checkpoint.read("model.encoder.layer_norm.bias")
    assert found.tobytes() == bare["encoder.layer_norm.bias"].tobytes()


@pytest.mark.parametrize(
    "text", ["", "{", '{"a": 1, "a": 2}', "\udcff", '{"transformers_weights": "other.safetensors"}']
)
def test_a_damaged_config(tiny, text):
    (tiny / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_model(tiny)


def test_a_damaged_structure():
    directory = tiny_nllb_moe("model", config={"prunecli": {"experts": 3}})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_model(directory)


def test_no_weights():
    directory = tiny_nllb_moe("model")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_model(directory)


def test_a_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: missing \(1 of 3"):
        open_model(sharded)


@pytest.mark.parametrize(
    ("name", "shard", "said"),
    [
        ("model.ghost.weight", "model-00001-of-00003.safetensors", "weight is not in model-00001"),
        ("a\x1b[2J\nb", "model-00001-of-00003.safetensors", "is no name of a tensor"),
        *(
            ("model.shared.weight", shard, "outside of its directory")
            for shard in ("../other.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\c.bin", "")
        ),
    ],
)
def test_an_index_that_names_what_cannot_be(sharded, name, shard, said):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = shard
    write_json(path, index)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_model(sharded)
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "value", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {}}], ids=str
)
def test_an_index_of_another_form(sharded, value):
    write_json(sharded / "model.safetensors.index.json", value)
    with pytest.raises(CheckpointError, match="holds no weight_map"):
        open_model(sharded)


def test_of_a_tensor_in_two_shards_the_later_is_read_as_by_transformers(sharded):
    last = sharded / "model-00003-of-00003.safetensors"
    save_file({**load_file(last), "model.shared.weight": np.zeros((2, 2), np.float32)}, last)
    assert not open_model(sharded).read("model.shared.weight").any()


def test_a_file_that_vanishes_before_it_is_read(tiny):
    checkpoint = open_model(tiny)
    (tiny / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*No such file"):
        checkpoint.read("model.shared.weight")


def test_a_file_that_shrinks_while_it_is_open(tiny):
    checkpoint = open_model(tiny)
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="truncated while it was read"):
        checkpoint.read(list(checkpoint.tensors)[-1])
