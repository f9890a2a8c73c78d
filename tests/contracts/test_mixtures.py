"""Expert pruning of mixture-of-experts language models: the stock class opens the result, which is the masked model."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from prunecli.commands.measure import collect_gates
from prunecli.commands.prune import prune_experts
from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.pipeline import apply
from prunecli.selection.cut import cut
from tests.commands.calls import done
from tests.contracts.method_contract import assert_near, written
from tests.families import cutting, tiny
from tests.families.cutting import experts_apart, some_experts, without_experts
from tests.opening import load
from tests.quantising import quantise
from tests.selections import kept_experts
from tests.stock_mixtures import save_mixture, tiny_mixture
from tests.tiny import change_config, config_of, json_of


def stock_class(model_type: str) -> Any:
    return tiny.auto_class(model_type)


def logits(model: Any) -> Tensor:
    return cutting.logits(model, tiny.inputs(model))


def masked_logits(model: Any, mask: AbstractContextManager[Any]) -> Tensor:
    """Logits of the model within `mask`, which are others than those before."""
    before = logits(model)
    with mask:
        masked = logits(model)
    assert not torch.equal(masked, before)
    return masked


FOUND = (
    "qwen2_moe",  # apart, beside shared ones
    "jamba",
    "deepseek_v2",  # in groups, if the config says so
    "deepseek_v32",  # in groups, with correction biases
    "ernie4_5_moe",  # with correction biases on the second axis
    "laguna",  # with those within the experts' module
    "lfm2_moe",
    "granitemoe",  # stacked
    "llama4_text",
    "aria_text",
    "dbrx",  # stacked below one another
    "gemma4_text",  # with a router of more than a matrix
    "jetmoe",  # of the attention too
    "switch_transformers",
)
"""A type for each way in which experts and routers are stored; `make families` tries every type."""


@pytest.mark.parametrize("model_type", FOUND)
def test_the_stock_class_opens_the_masked_model(model_type):
    model = tiny_mixture(model_type)
    model.save_pretrained("source")
    assert experts_apart(model, open_model("source"), "pruned") < 1e-4


def test_as_many_experts_stay_as_the_attention_beside_them_has_heads():
    pytest.importorskip("transformers", minversion="5.23")  # has the class
    config_class = transformers.MistralLarge4Config
    model = tiny.drawn(
        transformers.MistralLarge4ForConditionalGeneration, config_class(**tiny.values_of(config_class))
    )
    model.save_pretrained("model")
    checkpoint = open_model("model")
    kept = {layer.name: (0, 2, 3, 7) for layer in checkpoint.mixtures}
    assert model.config.text_config.index_n_heads == 4
    assert apply(checkpoint, cut(checkpoint, kept_experts(kept))).stock_support.is_stock


def assert_opens_with_its_code(path: str, pruned: Any, reason: str) -> None:
    """Transformers runs the code of the result; without, the stock class says the reason."""
    model, info = AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert torch.equal(logits(model), logits(pruned))
    with pytest.raises(Exception, match=reason):
        type(pruned).from_pretrained(path)


UNEVEN = {
    "qwen3_moe": ((0, 3, 4, 5, 7), (1, 2, 6)),
    "mixtral": (tuple(range(8)), (7, 2), (0, 1, 2, 3, 4, 6)),
    "deepseek_v3": ((0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 4, 7)),
    "gpt_oss": ((1, 3), (0, 1, 2, 3, 4), (2, 4, 6)),
    "nemotron_h": ((0, 1, 6), (3, 4)),
}
"""Family -> experts that stay of each layer: own tensors, stacked ones, correction biases, groups, other blocks."""


def uneven(checkpoint: Checkpoint, model_type: str) -> dict[str, tuple[int, ...]]:
    layers = (layer.name for layer in checkpoint.mixtures)
    return dict(zip(layers, UNEVEN[model_type], strict=True))


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_layers_with_numbers_of_their_own(model_type):
    source, output, again = save_mixture("source", model_type), "pruned", "again"
    checkpoint = open_model(source)
    kept = uneven(checkpoint, model_type)
    applied = apply(checkpoint, cut(checkpoint, kept_experts(kept)), output)
    full = stock_class(model_type).from_pretrained(source).eval()
    expected = masked_logits(full, without_experts(full, checkpoint, kept))
    assert "experts differ between layers" in applied.stock_support.line
    pruned = load(output)
    assert isinstance(pruned, stock_class(model_type))
    assert_near(logits(pruned), expected)
    pruned.save_pretrained(again)
    for path in (output, again):
        assert_opens_with_its_code(path, pruned, "experts differ between layers")


def test_they_are_measured_and_pruned_again():
    """In memory and layer by layer; what then has one number for all layers is a stock model again."""
    source, output = save_mixture("source", "qwen3_moe"), "pruned"
    written(source, kept_experts(uneven(open_model(source), "qwen3_moe")), output)
    Path("text").write_text("the hen and a hat in the inn\n" * 20)
    found = []
    for options in ("-o whole.json", "-o layers.json --memory 4GiB"):
        done(collect_gates, output, "--text one=text", options)
        found.append(json_of(options.split()[1]))
        del found[-1]["command"]
    assert found[0] == found[1]
    done(prune_experts, output, "--gates whole.json --experts-per-layer 2 -o even")
    config = config_of("even")
    assert config["num_local_experts"] == 2
    assert not {"auto_map", "transformers_weights"} & set(config)
    assert sorted(path.name for path in Path("even").glob("*.py")) == []
    _, info = stock_class("qwen3_moe").from_pretrained("even", output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize(
    ("model_type", "config"),
    [("switch_transformers", {}), ("kimi_linear", {"quantization_config": {"quant_method": "fp8"}})],
)
def test_where_layers_must_be_alike(model_type, config):
    source = save_mixture("source", model_type)
    change_config(source, **config)
    checkpoint = open_model(source)
    widths = [range(8) if number % 2 else (1, 2, 5, 6) for number in range(len(checkpoint.mixtures))]
    kept = {layer.name: tuple(ids) for layer, ids in zip(checkpoint.mixtures, widths, strict=True)}
    with pytest.raises(UnsupportedModelError, match="experts differ between layers"):
        cut(checkpoint, kept_experts(kept))


def test_a_limit_that_is_none_stays_infinity():
    """Nemotron-H's published configs have such a limit; transformers 5 writes it in a form of its own."""
    source, output = save_mixture("source", "nemotron_h"), "pruned"
    change_config(source, time_step_limit=[0.0, float("inf")])
    written(source, kept_experts(some_experts(open_model(source))), output)
    assert config_of(output)["time_step_limit"] == [0.0, float("inf")]
    assert load(output).config.time_step_limit[1] == float("inf")


def test_quantised_layers_with_numbers_of_their_own():
    source, output = Path("stored"), "pruned"
    made = save_mixture("made", "mixtral")
    quantise(made, source, "plain", "fp8", lambda name: ".experts." in name)
    checkpoint = open_model(source)
    kept = uneven(checkpoint, "mixtral")
    written(source, kept_experts(kept), output)
    full = load(source)
    expected = masked_logits(full, without_experts(full, checkpoint, kept))
    pruned = load(output)
    assert_near(logits(pruned), expected)
    pruned.save_pretrained("decoded")
    again = load("decoded")
    assert torch.equal(logits(again), logits(pruned))
