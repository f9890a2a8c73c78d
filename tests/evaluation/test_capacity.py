"""What fits of mixture-of-experts language models: against the files that prune-experts writes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prunecli.commands.compare import compare_models
from prunecli.commands.evaluate import bench_latency, evaluate
from prunecli.commands.finetune import finetune
from prunecli.commands.inspect import inspect
from prunecli.commands.measure import score_heads
from prunecli.commands.prune import prune_experts
from prunecli.errors import UsageError
from prunecli.evaluation import capacity
from prunecli.methods.experts.collect import collect_gates
from prunecli.model import cost
from prunecli.model.checkpoint import open_model
from prunecli.model.cost import usual_load
from prunecli.modules import building, fitting
from prunecli.running.layerwise import runner
from prunecli.running.layerwise.budget import SPREAD
from prunecli.tensors.quantities import size_text
from prunecli.text.plain import Corpus
from prunecli.training import finetune as finetuning
from tests.commands.calls import Result, call, done, refused
from tests.families import tiny_family
from tests.quantising import quantise
from tests.stock_mixtures import tiny_mixture
from tests.tiny import tiny_nllb_moe, write_files, write_plain_tokenizer

KIB = 1 << 10


def write(directory: str, model_type: str, **config: Any) -> Path:
    tiny_mixture(model_type, **config).bfloat16().save_pretrained(directory)
    return Path(directory)


def fit(directory: Path, budget: int, **load: int) -> dict[str, Any]:
    opened = open_model(directory)
    return capacity.what_fits(opened, budget, None, usual_load(opened, **load)).to_json()


def tensor_bytes(directory: Path) -> int:
    return sum(
        tensor.nbytes for file in directory.glob("*.safetensors") for tensor in load_file(file).values()
    )


@pytest.mark.parametrize(
    ("model_type", "kept"),
    [
        # 2 of 8 from 1 of 2 groups: 2 stay in each group of 2 layers; what is left at 0.75 is too few.
        ("deepseek_v3", {0.25: 12, 0.5: 8}),
        ("gpt_oss", {0.25: 18, 0.5: 12, 0.75: 6}),
    ],
)
def test_every_ratio_is_what_prune_experts_writes(model_type, kept):
    source = write("source", model_type)
    found = fit(source, KIB, length=4)
    assert found["whole"][0]["weight_bytes"] == tensor_bytes(source)
    ways = {way["ratio"]: way for way in found["pruned"] if way["as_stored"]}
    assert {ratio: way["keep"] for ratio, way in ways.items()} == kept
    ratio, way = next(iter(ways.items()))
    out = Path("out")
    done(prune_experts, source, "--metric random --ratio", ratio, "-o", out)
    assert way["weight_bytes"] == tensor_bytes(out)


@pytest.mark.parametrize("scheme", ["gptq", "mxfp4"])
def test_of_quantised_ones_as_stored_and_decoded(scheme):
    stacked = scheme == "mxfp4"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}
    plain = write("plain", "gpt_oss" if stacked else "glm4_moe", **sizes)
    source, decoded = Path("stored"), Path("decoded")
    expert = "experts.gate_up_proj" if stacked else "_proj.weight"
    quantise(plain, source, decoded, scheme, lambda name: expert in name and "bias" not in name)
    found = fit(source, KIB, length=4)
    assert [way["as_stored"] for way in found["whole"]] == [True, False]
    assert found["whole"][0]["weight_bytes"] == tensor_bytes(source)
    assert found["whole"][1]["weight_bytes"] == tensor_bytes(decoded)
    for directory, as_stored in ((source, True), (decoded, False)):
        out = Path(f"out-{as_stored}")
        done(prune_experts, directory, "--metric random --ratio 0.5 -o", out)
        way = next(way for way in found["pruned"] if (way["as_stored"], way["ratio"]) == (as_stored, 0.5))
        assert way["weight_bytes"] == tensor_bytes(out)
    need = found["whole"][1]["needed_bytes"]
    assert fit(source, need, length=4)["whole"][1]["fits"]
    if not stacked:  # to inspect what is not stacked takes long, and says the same
        return
    shown = call(inspect, source, "--fit", need - 1, "--fit-length 4")
    assert "As stored, it fits as it is." in shown.out
    assert "Next: prunecli prune-experts" in shown.out
    assert "--dtype" not in shown.out


def test_what_is_quantised_and_how_far():
    plain = tiny_family("plain", "llama")
    source = Path("stored")
    quantise(plain, source, "decoded", "fp8", lambda name: ".mlp." in name)
    found = call(inspect, source, "--json").json
    weights = 3 * 3  # of each layer
    assert found["quantisation"]["method"] == "fp8"
    assert found["quantisation"]["schemes"] == {"scaled, 8 bits, blocks of 16 x 16": weights}
    counted = (found["quantisation"]["weights"], found["quantisation"]["parameters"])
    assert counted == (weights, weights * 32 * 48)
    values = sum(tensor.numel() for tensor in load_file(plain / "model.safetensors").values())
    assert found["total"]["parameters"] == values
    assert found["quantisation"]["bits_per_parameter"] == pytest.approx(8 * tensor_bytes(source) / values)
    assert "Quantised: fp8: 9 matrices scaled, 8 bits" in call(inspect, source).out
    assert call(inspect, plain, "--json").json["quantisation"] is None


def test_what_is_named_layer_by_layer_is_the_least_that_collect_gates_takes(monkeypatch):
    plain = write("plain", "qwen3_moe", hidden_size=32, max_position_embeddings=32)
    write_plain_tokenizer(plain)
    source = Path("stored")
    quantise(plain, source, "decoded", "fp8", lambda name: name.endswith("_proj.weight"))
    monkeypatch.setattr(runner, "resident_now", lambda: 300 << 20)
    monkeypatch.setattr(capacity, "resident_now", lambda: 300 << 20)
    monkeypatch.setattr(capacity, "found_device", lambda: torch.device("cpu"))
    found = fit(source, 1 << 30)["by_layer"]
    assert (found["batch_tokens"], found["batch_length"]) == (4096, 32)
    text = Corpus("long", (Path("a"),), ("a hen " * 2000,))
    for way in found["ways"]:
        named = size_text(way["needed_bytes"] + SPREAD)
        with pytest.raises(UsageError, match=f"the smallest that works is {named} "):
            collect_gates(source, [text], device="cpu", dtype=way["dtype"], memory=way["needed_bytes"] - 1)
        assert way["fits"]
        assert way["state_tokens"] > 0


LINES = "the hen\na hat\nno\nthe inn is on the tin\nhat and hen\n" * 4
DATA = "--data text --pairs eng_Latn-fra_Latn"


@pytest.fixture
def folder():
    tiny_nllb_moe("moe", experts=64, d_model=32, ffn=64)
    tiny_family("llama", "llama", hidden_size=64, intermediate_size=256)
    names = (f"{split}.{end}" for split in ("val", "test", "train") for end in ("eng_Latn", "fra_Latn"))
    write_files("text", dict.fromkeys(names, LINES))
    Path("lines").write_text(LINES)


def weights(path: str, width: int) -> int:
    return width * sum(info.numel for info in open_model(path).tensors.values())


COMMANDS = {
    "evaluate": (evaluate, "moe", f"{DATA} --batch-tokens 64 --beam 1 --max-new-tokens 4"),
    "evaluate lm": (evaluate, "llama", "--task lm --text lines"),
    "bench-latency": (bench_latency, "moe", f"{DATA} --beam 1 --max-new-tokens 2"),
    "score-heads": (score_heads, "moe", DATA),
    "score-heads ablation": (score_heads, "llama", "--text lines --metric ablation"),
    "compare-models": (compare_models, "moe", f"{DATA} --measure cka"),
    "finetune": (finetune, "moe", f"{DATA} --steps 1 --batch-tokens 64"),
    "finetune a teacher's": (finetune, "moe", f"{DATA} --steps 1 --teacher moe"),
}


def run(name: str, *more: str) -> Result:
    return call(*COMMANDS[name], *more)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_refused_before_a_weight_is_read(name, folder, monkeypatch):
    monkeypatch.setattr(building, "read_spec", None)  # not called
    monkeypatch.setattr(building, "fill", None)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 30 * KIB)
    made = run(name)
    refused(made, "30.00 KiB are free", 1)
    assert "More: prunecli inspect " in made.err
    assert not list(Path().glob("*.json"))


def ratio_of(made: Result, model: str) -> str:
    found = re.search(rf"prune-experts {model} --ratio ([\d.]+) ", made.err)
    assert found, made.err
    return found[1]


@pytest.mark.parametrize("name", ["evaluate", "finetune a teacher's"])
def test_the_ratio_that_is_named_fits_and_the_next_smaller_does_not(name, folder, monkeypatch):
    monkeypatch.setattr(fitting, "multiplies_natively", lambda *_: True)
    trains = name.startswith("finetune")
    # Half of the experts, more or less: 4 values of 4 bytes for each trained weight, else 2 bytes.
    free = weights("moe", 16 if trains else 2) * 2 // 3
    free += weights("moe", 4) if "teacher" in name else 0
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    made = run(name)
    refused(made, "are free", 1)
    named = float(ratio_of(made, "moe"))
    dtype = "" if trains else "--dtype bf16"
    step = 16 / (4 * 64)  # at 3:1 experts go by the dozen or so
    for fits, ratio in ((True, named), (False, named - step)):
        out = f"out-{fits}"
        done(prune_experts, f"moe --metric random --ratio {ratio} -o {out}", dtype)
        command, _, options = COMMANDS[name]
        again = call(command, out, options, f"-o r-{fits}")
        assert (again.status == 0) is fits, again.err


def test_layer_by_layer_is_named_where_the_command_can(folder, monkeypatch):
    """A tiny model takes less than a process, so what is free is made out to be much, and its weights more."""
    monkeypatch.setattr(fitting, "new_memory", lambda _device: 5 << 30)
    for module in (fitting, finetuning, cost):
        monkeypatch.setattr(module, "weight_bytes", lambda *_: 8 << 30)
    for name in ("evaluate lm", "score-heads"):
        assert "--memory 4GiB" in run(name).err
    for name in ("evaluate", "score-heads ablation", "finetune", "bench-latency"):
        assert "--memory" not in run(name).err
    assert run("evaluate lm", "--memory 4GiB").status == 0


def test_of_quantised_language_models_too(folder, monkeypatch):
    write_plain_tokenizer(write("plain", "glm4_moe"))
    quantise("plain", "glm", "decoded", "fp8", lambda name: "experts." in name)
    free = sum(2 * info.numel for info in open_model("glm").unquantised.values()) * 9 // 10
    monkeypatch.setattr(fitting, "multiplies_natively", lambda *_: True)
    monkeypatch.setattr(fitting, "new_memory", lambda _device: free)
    made = call(evaluate, "glm --task lm --text lines")
    refused(made, "are free", 1)
    assert "More: prunecli inspect glm --fit" in made.err
    done(prune_experts, f"glm --metric random --ratio {ratio_of(made, 'glm')} -o less")
    left = sum(2 * info.numel for info in open_model("less").unquantised.values())
    assert left <= 0.9 * free
