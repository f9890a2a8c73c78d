"""Quantised checkpoints: moved without being decoded, measured as what they stand for, else refused."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.commands.prune import prune_ffn, prune_heads, prune_layers
from prunecli.commands.share import share_ffn
from prunecli.errors import StatisticsError
from prunecli.methods.experts.collect import collect_gates
from prunecli.methods.experts.metrics import aimer_bytes, aimer_values
from prunecli.methods.experts.plan import plan_experts
from prunecli.methods.options import ExpertOptions
from prunecli.model.checkpoint import open_model
from prunecli.model.inventory import take_inventory
from prunecli.modules.dequantised import as_run
from prunecli.pipeline import apply
from prunecli.selection.cut import Selection, cut
from tests.commands.calls import call, done
from tests.families import tiny_family
from tests.methods.experts.test_batches_texts import OPTIONS, TEXTS
from tests.methods.experts.test_layerwise import PLENTY
from tests.opening import load
from tests.quantising import quantise
from tests.reference.quantisation import SCHEMES
from tests.selections import kept_experts
from tests.stock_mixtures import save_mixture
from tests.tiny import change_config, config_of

Pair = tuple[Path, Path]
"""A quantised checkpoint, and the plain one that it stands for."""


def stored_and_plain(source: Path, scheme: str, which: Callable[[str], bool]) -> Pair:
    stored, plain = Path("stored"), Path("plain")
    quantise(source, stored, plain, scheme, which)
    return stored, plain


def dense(scheme: str) -> Pair:
    return stored_and_plain(tiny_family("source", "llama"), scheme, is_projection)


def mixture(model_type: str, scheme: str, which: Callable[[str], bool], **sizes: int) -> Pair:
    return stored_and_plain(save_mixture("source", model_type, hidden_size=32, **sizes), scheme, which)


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def is_stacked(name: str) -> bool:
    return name.endswith(("gate_up_proj", "down_proj"))


def assert_stands_for(stored: Path | str, plain: Path | str) -> None:
    """Every tensor of `plain`, value by value, is what `stored` stands for."""
    one = open_model(stored)
    other = open_model(plain)
    one.check()
    decoded = as_run(one, torch.float32)
    assert dict(decoded.tensors) == dict(other.tensors)
    for name in other.tensors:
        assert np.array_equal(decoded.read(name), other.read(name)), name


def settings_of(directory: Path | str) -> Any:
    return config_of(directory)["quantization_config"]


KIND = ("model_type", "scheme", "which", "sizes")
STACKED = ("gpt_oss", "mxfp4", is_stacked, {"intermediate_size": 32})


def alone(scheme: str) -> tuple[Any, ...]:
    """A mixture whose experts have tensors of their own."""
    return "qwen3_moe", scheme, is_projection, {"moe_intermediate_size": 32}


@pytest.mark.parametrize(KIND, [*map(alone, SCHEMES), STACKED])
def test_experts_are_pruned_as_they_are_stored(model_type, scheme, which, sizes):
    results = []
    for source in mixture(model_type, scheme, which, **sizes):
        checkpoint = open_model(source)
        kept = {layer.name: (1, 2, 4, 7) for layer in checkpoint.mixtures}
        done = apply(checkpoint, cut(checkpoint, kept_experts(kept)), source.with_name(f"{source.name}-out"))
        results.append((done.summary.parameters_before, done.summary.parameters_after))
        assert take_inventory(checkpoint).total.parameters == done.summary.parameters_before
    assert results[0] == results[1]
    assert_stands_for("stored-out", "plain-out")
    ids = torch.arange(3, 19)[None]
    one, other = (load(name) for name in ("stored-out", "plain-out"))
    assert torch.equal(one(ids).logits, other(ids).logits)


measured = pytest.mark.parametrize(KIND, [alone("gptq"), STACKED])


@measured
def test_gates_are_those_of_the_plain_model(model_type, scheme, which, sizes):
    stored, plain = mixture(model_type, scheme, which, **sizes)
    collect = partial(collect_gates, choice=TEXTS, options=OPTIONS, device="cpu", dtype="float32")
    wanted = collect(plain).statistics.to_json()["entries"]
    assert collect(stored).statistics.to_json()["entries"] == wanted
    by_layer = collect(stored, memory=PLENTY)
    assert by_layer.statistics.to_json()["entries"] == wanted
    assert by_layer.report.bytes_read < 1.2 * open_model(stored).total_bytes < open_model(plain).total_bytes


@measured
def test_weights_alone_say_what_those_of_the_plain_model_say(model_type, scheme, which, sizes):
    found = []
    for path in mixture(model_type, scheme, which, **sizes):
        checkpoint = open_model(path)
        found.append(aimer_values(checkpoint, checkpoint.mixtures))
        assert 0 < aimer_bytes(checkpoint, ExpertOptions(metric="aimer")) <= checkpoint.total_bytes
    assert all(values.all() for values in found[0].values())
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scheme", ["fp8", "gptq, ordered", "nvfp4 of modelopt"])
def test_layers_go_and_tokens_go(scheme):
    pair = dense(scheme)
    settings = settings_of(pair[0])
    names = ["lm_head", "model.layers.1.mlp.gate", "layers.2.self_attn.k_proj"]
    settings["modules_to_not_convert"] = names
    change_config(pair[0], quantization_config=settings)
    (pair[0] / "hf_quant_config.json").write_text(json.dumps({"quantization": {"exclude_modules": names}}))
    for path in pair:
        done(prune_layers, path, f"--remove decoder:1 --output {path}-shallow")
    assert_stands_for("stored-shallow", "plain-shallow")
    renamed = ["lm_head", "layers.1.self_attn.k_proj"]
    assert settings_of("stored-shallow")["modules_to_not_convert"] == renamed
    beside = json.loads(Path("stored-shallow/hf_quant_config.json").read_text())
    assert beside == {"quantization": {"exclude_modules": renamed}}
    fewer = Selection({"tokens": range(3, 20)}, files={"tokenizer.json": None})
    plain = open_model(pair[1])
    outputs = [{one.name: one for one in cut(model, fewer).outputs} for model in (open_model(pair[0]), plain)]
    own = [name for name in outputs[1] if not is_projection(name)]
    assert all(outputs[0][name] == outputs[1][name] for name in own)


def test_a_pattern_that_holds_a_layers_number_is_refused():
    stored, _ = dense("fp8")
    ignored = {**settings_of(stored), "ignore": ["re:.*layers\\.(?:[12])\\..*gate"]}
    change_config(stored, quantization_config=ignored)
    result = call(prune_layers, stored, "--remove decoder:1 --output out")
    assert result.status == 1
    assert "the quantisation settings name layers by number" in result.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (prune_heads, "--metric random --ratio 0.25 --uniform"),
        (prune_ffn, "--metric random --ratio 0.5"),
        (prune_ffn, "--metric activation-norm --ratio 0.5 --text text.txt"),
        (share_ffn, "--decoder share"),
    ],
)
def test_what_would_compute_with_them_is_refused(command, arguments):
    stored, _ = dense("gptq")
    Path("text.txt").write_text("the tin\n")
    result = call(command, stored, arguments, "--output out")
    assert result.status == 1, result.out
    assert re.search("_proj.weight is (quantised|of type U8)", result.err)
    assert not Path("out").exists()


def test_weights_of_an_unknown_kind_are_copied_and_no_more():
    path = tiny_family("source", "llama")
    change_config(path, quantization_config={"quant_method": "other"})
    done(prune_layers, path, "--remove decoder:1 --output shallow")
    result = call(prune_ffn, path, "--metric random --ratio 0.5 --output out")
    assert result.status == 1
    assert "quantised (other), in a way that prunecli does not know" in result.err


def test_statistics_of_the_original_choose_experts_of_its_quantised_copy():
    stored, plain = mixture("qwen3_moe", "fp8", is_projection)
    save_mixture("other", "qwen3_moe", hidden_size=32, seed=1)
    collect = partial(collect_gates, choice=TEXTS, options=OPTIONS, device="cpu", dtype="float32")
    original = collect("source").statistics
    options = ExpertOptions(gates=original, ratio=0.25)
    pruned = "pruned"
    copy = open_model(stored)
    dequantised = open_model(plain)
    plan = plan_experts(copy, options)
    assert plan.step["statistics_of"] == original.fingerprint != copy.fingerprint
    assert original.fingerprint in plan.reasons[-1]
    assert original.model.routers == dequantised.router_fingerprint
    apply(copy, cut(copy, plan), pruned)
    with pytest.raises(StatisticsError, match="its weights are others"):  # not quantised: another model
        plan_experts(dequantised, options)
    another = ExpertOptions(gates=collect("other").statistics, ratio=0.25)
    with pytest.raises(StatisticsError, match="its routers have other values"):
        plan_experts(copy, another)
    nameless = original.model_copy(update={"model": original.model.model_copy(update={"routers": None})})
    with pytest.raises(StatisticsError, match="does not say which routers"):
        plan_experts(copy, options.model_copy(update=dict(gates=nameless)))
    further = plan_experts(open_model(pruned), options)
    assert all(len(ids) < len(plan.kept[name]) for name, ids in further.kept.items())
