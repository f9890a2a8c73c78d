"""What fits of mixture-of-experts language models: against the files that prune-experts writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prunecli.commands.inspect import inspect
from prunecli.commands.prune import prune_experts
from prunecli.errors import UsageError
from prunecli.evaluation import capacity
from prunecli.methods.experts.collect import collect_gates
from prunecli.running.layerwise import runner
from prunecli.running.layerwise.budget import size_text
from prunecli.text.plain import Corpus
from tests.commands.calls import call, refused
from tests.quantising import quantise
from tests.stock_mixtures import tiny_mixture
from tests.tiny import write_plain_tokenizer


def write(directory: Path, model_type: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    tiny_mixture(model_type, **config).to(dtype).save_pretrained(directory)
    return directory


def fit(directory: Path, *options: object) -> dict[str, Any]:
    shown = call(inspect, directory, "--json", "--fit", *options)
    assert shown.status == 0, shown.err
    return json.loads(shown.out)["fit"]


def tensor_bytes(directory: Path) -> int:
    return sum(
        tensor.nbytes for file in directory.glob("*.safetensors") for tensor in load_file(file).values()
    )


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_moe",
        "qwen2_moe",
        "deepseek_v3",
        "deepseek_v2",
        "gpt_oss",
        "granitemoe",
        "llama4_text",
        "ernie4_5_moe",
        "jamba",
    ],
)
def test_every_ratio_is_what_prune_experts_writes(model_type: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", model_type)
    found = fit(source, "1KiB", "--fit-length", 4)
    assert found["whole"][0]["weight_bytes"] == tensor_bytes(source)
    ways = {way["ratio"]: way for way in found["pruned"] if way["as_stored"]}
    ratio, way = next(iter(ways.items()))
    out = tmp_path / "out"
    made = call(prune_experts, source, "--metric", "random", "--ratio", ratio, "-o", out)
    assert made.status == 0, made.err
    assert way["weight_bytes"] == tensor_bytes(out)


@pytest.mark.parametrize("scheme", ["fp8", "gptq", "mxfp4"])
def test_of_quantised_ones_as_stored_and_decoded(scheme: str, tmp_path: Path) -> None:
    stacked = scheme == "mxfp4"
    plain = write(
        tmp_path / "plain",
        "gpt_oss" if stacked else "glm4_moe",
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=32,
    )
    source, decoded = tmp_path / "stored", tmp_path / "decoded"
    expert = "experts.gate_up_proj" if stacked else "_proj.weight"
    quantise(plain, source, decoded, scheme, lambda name: expert in name and "bias" not in name)
    found = fit(source, "1KiB", "--fit-length", 4)
    assert [way["as_stored"] for way in found["whole"]] == [True, False]
    assert found["whole"][0]["weight_bytes"] == tensor_bytes(source)
    assert found["whole"][1]["weight_bytes"] == tensor_bytes(decoded)
    for directory, as_stored in ((source, True), (decoded, False)):
        out = tmp_path / f"out-{as_stored}"
        made = call(prune_experts, directory, "--metric", "random", "--ratio", 0.5, "-o", out)
        assert made.status == 0, made.err
        way = next(way for way in found["pruned"] if (way["as_stored"], way["ratio"]) == (as_stored, 0.5))
        assert way["weight_bytes"] == tensor_bytes(out)
    need = found["whole"][1]["needed_bytes"]
    shown = call(inspect, source, "--fit", need - 1, "--fit-length", 4)
    assert "As stored, it fits as it is." in shown.out
    assert "Next: prunecli prune-experts" in shown.out
    assert "--dtype" not in shown.out
    assert fit(source, need, "--fit-length", 4)["whole"][1]["fits"]


@pytest.mark.parametrize(("options", "step"), [((), 1), (("--multiple-of", 4), 4)])
def test_the_ratio_that_is_named_fits_and_keeps_the_most(
    options: tuple[object, ...], step: int, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", "qwen2_moe", num_experts=32)
    load = ("--fit-batch", 1, "--fit-length", 4, *options)
    first = fit(source, "1KiB", *load)
    half = next(way for way in first["pruned"] if way["ratio"] == 0.5)
    found = fit(source, half["needed_bytes"] + 100, *load)
    assert found["keep"] == half["keep"]
    assert half["keep"] % (3 * step) == 0
    shown = call(inspect, source, "--fit", half["needed_bytes"] + 100, *load)
    more = f"--multiple-of {step} " if step > 1 else ""
    assert f"Next: prunecli prune-experts {source} {more}--ratio {found['ratio']:g}" in shown.out.replace(
        "\n", ""
    )
    bare = call(inspect, source, "--fit", "1KiB", *load)
    assert "does not fit, and no ratio" in bare.out


def test_the_least_that_a_router_with_groups_needs_stays(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "deepseek_v3")
    found = fit(source, "1KiB", "--fit-length", 4)
    # 2 of 8 from 1 of 2 groups: 2 stay in each group of 2 layers; what is left at 0.75 is too few.
    assert [way["ratio"] for way in found["pruned"] if way["as_stored"]] == [0.25, 0.5]
    assert [way["keep"] for way in found["pruned"] if way["as_stored"]] == [12, 8]


def test_the_balance_of_translation_is_none_of_language_models(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "mixtral")
    refused(call(inspect, source, "--fit", "1GiB", "--balance", "3:1"), "this is a language model", 2)
    refused(call(inspect, source, "--multiple-of", "4"), "--multiple-of goes with --fit", 2)


def test_what_cannot_be_counted_is_said(tmp_path: Path) -> None:
    source = write(tmp_path / "source", "mixtral")
    config = json.loads((source / "config.json").read_text())
    config.pop("layer_types", None)
    (source / "config.json").write_text(json.dumps({**config, "sliding_window": 8}))
    assert "a window of 8 tokens" in fit(source, "1GiB")["unknown"][0]
    assert "a window of 8 tokens" in call(inspect, source, "--fit", "1GiB").out


def test_names_of_modules_that_are_not_there_are_a_note(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", "glm4_moe")
    source = tmp_path / "stored"
    quantise(plain, source, tmp_path / "decoded", "fp8", lambda name: "experts." in name)
    config = json.loads((source / "config.json").read_text())
    fine = [
        "lm_head",
        "gate",
        "re:.*no.such",
        "model.layers.*.none",
        "model.layers.0.mlp",
        "other.layers.1.mlp.gate",
    ]
    config["quantization_config"]["modules_to_not_convert"] = fine
    (source / "config.json").write_text(json.dumps(config))
    assert "not there" not in call(inspect, source).err
    fine += [f"model.layers.{number}.mlp.gate" for number in (1, 7, 8, 9, 10)]
    (source / "config.json").write_text(json.dumps(config))
    shown = call(inspect, source)
    assert shown.status == 0
    assert (
        "names 4 modules in its quantisation that are not there: model.layers.7.mlp.gate, "
        "model.layers.8.mlp.gate, model.layers.9.mlp.gate, …"
    ) in " ".join(shown.err.split())


def test_what_is_quantised_and_how_far(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", "glm4_moe")
    source = tmp_path / "stored"
    quantise(plain, source, tmp_path / "decoded", "fp8", lambda name: "mlp.experts." in name)
    found = json.loads(call(inspect, source, "--json").out)
    weights = 2 * 8 * 3  # two sparse layers, eight experts
    assert found["quantisation"]["method"] == "fp8"
    assert found["quantisation"]["schemes"] == {"scaled, 8 bits, blocks of 16 x 16": weights}
    assert (found["quantisation"]["weights"], found["quantisation"]["parameters"]) == (
        weights,
        weights * 32 * 24,
    )
    values = sum(tensor.numel() for tensor in load_file(plain / "model.safetensors").values())
    assert found["total"]["parameters"] == values
    assert found["quantisation"]["bits_per_parameter"] == pytest.approx(8 * tensor_bytes(source) / values)
    assert "Quantised: fp8: 48 matrices scaled, 8 bits" in call(inspect, source).out
    assert json.loads(call(inspect, plain, "--json").out)["quantisation"] is None


def test_what_is_named_layer_by_layer_is_the_least_that_collect_gates_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(tmp_path / "plain", "qwen3_moe", hidden_size=32, max_position_embeddings=32)
    write_plain_tokenizer(plain)
    source = tmp_path / "stored"
    quantise(plain, source, tmp_path / "decoded", "fp8", lambda name: name.endswith("_proj.weight"))
    monkeypatch.setattr(runner, "resident_now", lambda: 300 << 20)
    monkeypatch.setattr(capacity, "resident_now", lambda: 300 << 20)
    found = fit(source, "1GiB")["by_layer"]
    assert (found["batch_tokens"], found["batch_length"]) == (4096, 32)
    text = Corpus("long", (Path("a"),), ("a hen " * 2000,))
    for way in found["ways"]:
        with pytest.raises(UsageError, match=f"the smallest that works is {size_text(way['needed_bytes'])} "):
            collect_gates(source, [text], device="cpu", dtype=way["dtype"], memory=way["needed_bytes"] - 1)
        assert way["fits"]
        assert way["state_tokens"] > 0
