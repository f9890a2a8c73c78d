import json
import os
from pathlib import Path

import pytest

from prunecli.errors import CheckpointError, PruneError
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.tensors import side_files as sorting
from prunecli.tensors.side_files import folders_of
from tests.families import tiny_family
from tests.sentence_model import sentence_model
from tests.tiny import change_config

MODEL = Path("model")


def put(names: str) -> None:
    for name in names.split():
        write(MODEL / name, f"content of {name}")


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def found() -> tuple[set[str], tuple[str, ...]]:
    files = open_model(MODEL).side_files
    return {path.relative_to(MODEL).as_posix() for path in files.carried}, files.left_out


@pytest.fixture
def added():
    """A function that returns what is carried besides the files of a plain model, and what is left out."""
    tiny_family(MODEL, "bert")
    before, _ = found()

    def since() -> tuple[set[str], tuple[str, ...]]:
        carried, left_out = found()
        assert before <= carried
        return carried - before, left_out

    return since


def test_the_modules_of_a_sentence_transformer_travel_with_their_weights():
    sentence_model(MODEL)
    put("2_Dense/.cache/x 2_Dense/onnx/model.onnx 2_Dense/model.onnx")
    carried, left_out = found()
    configs = {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"}
    assert configs | {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= carried
    assert left_out == ("2_Dense/model.onnx", "2_Dense/onnx/")
    assert not any(".cache" in name for name in carried)


def test_other_formats_of_the_weights_are_left_out_by_name(added):
    put("README.md .cache/huggingface/x .git/config .gitattributes adapter_config.json")
    put("adapter_model.safetensors coreml/text-generation/model.mlpackage/Manifest.json")
    put("flax_model.msgpack model-Q4_K_M.gguf onnx/config.json onnx/model_quantized.onnx")
    put("openvino/openvino_model.xml original/params.json original/consolidated.00.pth params.json")
    put("pytorch_model.bin pytorch_model.bin.index.json rust_model.ot tf_model.h5 training_args.bin")
    carried, left_out = added()
    assert not carried
    assert " ".join(left_out) == (
        "adapter_config.json adapter_model.safetensors coreml/ flax_model.msgpack model-Q4_K_M.gguf onnx/ openvino/ "
        "original/ params.json pytorch_model.bin rust_model.ot tf_model.h5 training_args.bin"
    )


def test_other_files_travel_and_folders_where_they_hold_neither_weights_nor_a_training(added, monkeypatch):
    along = "assets/deep/figure.png chat_template.jinja modeling.py processor/preprocessor_config.json"
    put(along)
    put("checkpoint-500/optimizer.pt checkpoint-501/trainer_state.json logs/log.txt")
    put("runs/Jan01/events.out.tfevents.1 speech-lora/adapter_model.safetensors")
    put("out.training/state.json __pycache__/modeling.cpython-311.pyc")
    names = "__pycache__/ checkpoint-500/ checkpoint-501/ logs/ out.training/ runs/ speech-lora/"
    assert added() == ({*along.split()}, tuple(names.split()))
    monkeypatch.setattr(sorting, "LARGEST_FOLDER_BYTES", 60)
    put("data/a.txt data/b.txt data/c.txt")
    assert added() == ({*along.split()}, tuple(sorted([*names.split(), "data/"])))


def test_links_to_files_are_followed_and_links_to_folders_are_not(added):
    put("../elsewhere/notes.txt ../blob")
    (MODEL / "linked.txt").symlink_to("../blob")
    (MODEL / "broken.txt").symlink_to("nowhere")
    (MODEL / "outside").symlink_to("../elsewhere")
    (MODEL / "around").symlink_to(".")
    put("assets/a.png")
    (MODEL / "assets" / "up").symlink_to("..")
    os.mkfifo(MODEL / "pipe")
    assert added() == ({"linked.txt", "assets/a.png"}, ("around/", "broken.txt", "outside/", "pipe"))


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        ('[{"path": ""}, {"path": "1_Pooling"}, {"path": "deep\\\\2_Dense"}]', ("1_Pooling", "deep/2_Dense")),
        ('[{"path": "../out"}, {"path": "/etc"}, {"path": "a/../../b"}, {"path": 3}, {}, 5]', ()),
        ('{"path": "1_Pooling"}', ()),
        ("[", ()),
        ("[" * 100_000, ()),
    ],
)
def test_folders_that_modules_json_names(text, folders):
    Path("modules.json").write_text(text)
    assert folders_of(Path()) == folders


def test_a_module_outside_of_the_directory_is_not_carried(added):
    put("../other/secret.txt")
    (MODEL / "modules.json").write_text('[{"path": "../other"}]')
    assert added() == ({"modules.json"}, ())


@pytest.mark.parametrize("has_config", [False, True])
def test_a_transformer_in_a_folder_of_its_own_is_pointed_to(has_config):
    sentence_model(MODEL, transformer="0_Transformer")
    if has_config:
        (MODEL / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"the transformer lies in 0_Transformer, as modules") as caught:
        open_model(MODEL)
    assert caught.value.remedy.startswith("Give model/0_Transformer; its result takes the place of")
    open_model("model/0_Transformer").close()


CONFIG = {"config.json": {"model_type": "bloom"}}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "org/base"}
CASES = {
    "empty": ({}, "an empty directory", "Copy a model into it"),
    "adapter_model.safetensors": (
        {"adapter_config.json": LORA, "adapter_model.safetensors": ""},
        "not a directory (an adapter (LORA) of org/base",
        "Give a directory here with its adapter_config.json",
    ),
    "adapter_config.json": (
        {"adapter_config.json": {"peft_type": "PROMPT_TUNING"}},
        "an adapter (PROMPT_TUNING)",
        "or its base",
    ),
    "several of gguf": (
        {"a.Q4.gguf": "", "b.gguf": ""},
        "in GGUF (a.Q4.gguf)",
        "one file here that ends in .gguf",
    ),
    "model.safetensors": ({**CONFIG, "model.safetensors": ""}, "a file, not", "Give the directory that"),
    "tensorflow": ({**CONFIG, "tf_model.h5": ""}, "weights of TensorFlow (tf_model.h5)", "from_tf=True"),
    "flax": ({**CONFIG, "flax_model.msgpack": ""}, "weights of Flax", "from_flax=True"),
    "onnx": ({**CONFIG, "onnx/model.onnx": ""}, "ONNX or OpenVINO (onnx/model.onnx)", "was exported"),
    "of its authors": (
        {"consolidated.00.pth": ""},
        "in a format of its authors",
        "the script of transformers",
    ),
    "shards": ({**CONFIG, "model-00001-of-00002.bin": ""}, "no index of the shards", "Download the index"),
    "pipeline": (
        {"model_index.json": {}, "text_encoder/config.json": {}, "unet/config.json": {}},
        "a pipeline of diffusers",
        "/text_encoder.",
    ),
    "training": ({"checkpoint-5/config.json": {}}, "a folder of checkpoints", "/checkpoint-5."),
    "no config": ({"model.safetensors": ""}, "weights and no config.json", "Copy the model's config.json"),
    "notes": ({"notes.txt": ""}, "not a checkpoint (it holds no config.json)", "Give the directory"),
}
"""A name, or the file that is given in place of the directory -> files, what is said of them, and the remedy."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_checkpoint_is_said_to_be_what_it_is(case):
    files, what, remedy = CASES[case]
    MODEL.mkdir()
    for name, content in files.items():
        write(MODEL / name, json.dumps(content) if name.endswith(".json") else content)
    with pytest.raises(PruneError) as refused:
        open_model(MODEL / case if case in files else MODEL)
    assert what in refused.value.message
    assert remedy in str(refused.value.remedy)


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("gpt2", {}, r'names no "model_type"\nAdd "model_type"; the tensors fit gpt2\.'),
        ("bert", {"architectures": None}, r"the tensors fit bert\."),
        ("bert", {"hidden_size": 8}, r"the tensors fit no type of the installed"),
        ("bert", {"_class_name": "UNet"}, "of UNet, of diff"),
        ("bert", {"hidden_size_of_mine": 8}, r"the tensors fit no type of the installed"),
    ],
)
def test_a_config_without_a_type(case, changes, said):
    path = tiny_family(MODEL, case)
    change_config(path, "model_type", **changes)
    with pytest.raises(PruneError, match=said):
        load_model(path, device="cpu")
    with pytest.raises(PruneError, match=said):
        open_model(path).require_architecture()
