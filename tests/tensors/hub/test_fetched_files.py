import pytest

from prunecli.model.checkpoint import open_model
from prunecli.tensors.hub.fetch import needed_files, weight_files
from tests.families import tiny_family
from tests.tiny import json_of

SIDE = (".gitattributes", "README.md", "config.json", "spiece.model", "tokenizer.json", "preview.png")
OTHER_FORMATS = (
    "flax_model.msgpack",
    "tf_model.h5",
    "model.gguf",
    "rust_model.ot",
    "onnx/model.onnx",
    "onnx/config.json",
    "original/consolidated.00.pth",
    "consolidated.safetensors",
    "openvino/openvino_model.bin",
    "training_args.bin",
)


def _never(name):
    raise AssertionError(name)


def test_one_format_of_the_weights_and_the_side_files():
    held = [*SIDE, *OTHER_FORMATS, "model.safetensors", "pytorch_model.bin"]
    assert needed_files(dict.fromkeys(held, 1), _never) == (
        "README.md",
        "config.json",
        "preview.png",
        "spiece.model",
        "tokenizer.json",
        "model.safetensors",
    )


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_index_decides_which_shards(name):
    stem, _, ending = name.partition(".")
    index = {"weight_map": {"a": f"{stem}-1.{ending}", "b": f"{stem}-2.{ending}", "c": f"{stem}-1.{ending}"}}
    held = [*SIDE, f"{name}.index.json", *(f"{stem}-{number}.{ending}" for number in (1, 2, 3))]
    files = needed_files(dict.fromkeys(held, 1), {f"{name}.index.json": index}.__getitem__)
    assert files[-3:] == (f"{name}.index.json", f"{stem}-1.{ending}", f"{stem}-2.{ending}")
    assert f"{stem}-3.{ending}" not in files


def test_what_is_fetched_is_what_a_directory_of_the_same_files_carries(tmp_path):
    (tmp_path / "all").mkdir()
    directory = tiny_family(tmp_path / "all" / "model", "bert")
    extra = [
        *OTHER_FORMATS,
        "images/a.txt",
        "checkpoint-5/a.json",
        "corpus.zip",
        "adapter_config.json",
        ".x/y",
    ]
    for name in [*extra, "1_Dense/config.json", "1_Dense/pytorch_model.bin", "1_Dense/model.safetensors"]:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("x")
    (directory / "modules.json").write_text('[{"path": "1_Dense"}]')
    held = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file()
    }
    fetched = needed_files(held, lambda name: json_of(directory / name))
    with open_model(directory) as checkpoint:
        carried = {path.relative_to(directory).as_posix() for path in checkpoint.side_files.carried}
    assert {"images/a.txt", "1_Dense/model.safetensors"} <= carried
    assert set(fetched) == carried | {"config.json", "model.safetensors"}


@pytest.mark.parametrize("index", [[], {}, {"weight_map": 3}, {"weight_map": {"a": None}}])
def test_what_is_wrong_with_an_index_is_left_to_the_reader(index):
    assert weight_files(["model.safetensors.index.json"], lambda _name: index) == (
        "model.safetensors.index.json",
    )
