"""NLLB-MoE's record says the same as the class of transformers; what other classes and releases store is read."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from prunecli.architectures import NLLB_MOE
from prunecli.architectures.records import TensorSpec
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from prunecli.model.declared import Sizes
from prunecli.model.layout import resolve
from prunecli.model.parts import within
from prunecli.model.structure import Structure
from tests.families import random_state, stock_model, tiny_config_of, tiny_family
from tests.tiny import config_of, tiny_config, tiny_nllb_moe, write_json, write_weights

CONFIG = tiny_config(experts=5, d_model=16, ffn=24, layers=4, sparse_step=2, vocab=40)
CASES = {
    "nllb-moe": CONFIG,
    "nllb-moe-router-bias": {**CONFIG, "router_bias": True},
    "nllb-moe-dense-decoder": {**CONFIG, "decoder_sparse_step": 0},
}


@functools.cache
def stock(case: str) -> Any:
    """The stock model of one of `CASES`."""
    return stock_model(CASES[case])


def is_buffer(name: str) -> bool:
    return name.endswith("embed_positions.weights")


def stock_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stock model's state, without tied aliases and what it computes."""
    state = stock_model(config).state_dict()
    return {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if name not in NLLB_MOE.tied and not is_buffer(name)
    }


def all_specs() -> Iterator[TensorSpec]:
    yield from NLLB_MOE.tensors
    for stack in NLLB_MOE.stacks:
        yield from (*stack.norms, *stack.ffn.tensors, *stack.ffn.router)
        for attention in stack.attentions:
            yield from attention.tensors


@pytest.mark.parametrize("case", CASES)
class TestDeclaredTensors:
    def test_are_those_of_the_stock_model(self, case):
        assert resolve(NLLB_MOE, CASES[case], Structure()).shapes == stock_shapes(CASES[case])

    def test_aliases_and_buffers_are_those_of_the_stock_model(self, case):
        model = stock(case)
        held = model.state_dict()
        for alias, name in NLLB_MOE.tied.items():
            assert model.get_parameter(alias) is model.get_parameter(name), alias
        assert set(model.all_tied_weights_keys) <= set(NLLB_MOE.tied)
        assert all(is_buffer(name) for name, _ in model.named_buffers() if name not in held)

    def test_hidden_units_lie_on_the_axes_that_grow_with_the_width(self, case):
        config = CASES[case]
        before = stock_shapes(config)
        after = stock_shapes({**config, **{stack.ffn.width: 200 for stack in NLLB_MOE.stacks}})
        grown = {
            name: axis
            for name in before
            for axis, size in enumerate(before[name])
            if size != after[name][axis]
        }
        declared = {}
        for stack in NLLB_MOE.stacks:
            for number in range(Sizes(NLLB_MOE, config).count(stack.depth)):
                ffn = within(stack.layers.format(layer=number), stack.ffn)
                experts = (f"{ffn}.experts.expert_{expert}" for expert in range(config["num_experts"]))
                declared |= {
                    f"{prefix}.{spec.name}": spec.units.dim
                    for prefix in (ffn, *experts)
                    for spec in stack.ffn.tensors
                    if spec.units is not None and f"{prefix}.{spec.name}" in before
                }
        assert declared == grown

    def test_norms_are_those_of_the_layers(self, case):
        model = stock(case)
        for stack in NLLB_MOE.stacks:
            for part in (stack.ffn, *stack.attentions):
                for norm in part.norms:
                    weight = model.get_submodule(f"{stack.layers.format(layer=0)}.{norm}").weight
                    assert weight.shape == (CONFIG["d_model"],)
                assert any(spec.name.startswith(part.norms) for spec in stack.norms)


def test_attributes_are_the_defaults_of_transformers():
    made = transformers.AutoConfig.for_model("nllb-moe")
    for key, default in NLLB_MOE.attributes.items():
        value = getattr(made, key, None)
        assert (type(value), value) == (type(default), default), key
    axes = {axis for spec in all_specs() for axis in spec.shape} - {"expert_count"}
    axes |= {stack.depth for stack in NLLB_MOE.stacks}
    assert all(Sizes(NLLB_MOE, {}).count(axis) > 0 for axis in axes)


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"_remove_final_layer_norm": True, "tie_word_embeddings": False},
    ],
)
def test_norms_that_a_config_takes_away_fit(changes):
    checkpoint = open_model(tiny_family("model", "opt", **changes))
    checkpoint.check()
    other = [name for name in checkpoint.tensors if checkpoint.layout.part(name) == "other"]
    assert all(name.startswith("lm_head.") for name in other)


def older(model_type: str, rename: dict[str, str], more: dict[str, tuple[int, ...]]) -> Path:
    directory = tiny_family("old", model_type)
    state = random_state(config_of(directory))
    found = {}
    for name, values in state.items():
        for old, new in rename.items():
            name = name.replace(old, new)
        found[name] = values
    found |= {name: np.ones(shape, np.float32) for name, shape in more.items()}
    write_weights(directory, found)
    return directory


@pytest.mark.parametrize(
    ("model_type", "rename", "more"),
    [
        ("gpt2", {"transformer.": ""}, {"h.0.attn.bias": (1, 1, 8, 8), "h.1.attn.masked_bias": ()}),
        (
            "bert",
            {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
            {"bert.embeddings.position_ids": (1, 66), "cls.seq_relationship.weight": (2, 32)},
        ),
        ("bert", {"bert.": ""}, {"pooler.dense.weight": (32, 32)}),
        ("marian", {}, {"model.encoder.embed_positions.weight": (64, 32)}),
        ("m2m_100", {}, {"model.decoder.embed_positions.weights": (66, 32)}),
        ("t5", {}, {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (8, 4)}),
        ("opt", {"model.": ""}, {"decoder.version": (1,)}),
        ("llama", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}),
    ],
)
def test_older_checkpoints_are_read(model_type, rename, more):
    checkpoint = open_model(older(model_type, rename, more))
    checkpoint.check()
    assert {*open_model(tiny_family("new", model_type)).tensors} <= {*checkpoint.tensors}


@pytest.mark.parametrize(
    ("model_type", "alias", "name"),
    [
        ("m2m_100", "model.encoder.embed_tokens.weight", "model.shared.weight"),
        ("t5", "lm_head.weight", "shared.weight"),
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    ],
)
def test_a_copy_of_the_table_of_tokens_is_left_out(model_type, alias, name):
    directory = tiny_family("model", model_type)
    once = open_model(directory)
    tensors = {own: once.read(own) for own in once.tensors}
    write_weights(directory, {alias: tensors[name], **tensors})
    twice = open_model(directory)
    assert twice.tensors == once.tensors
    assert twice.fingerprint == once.fingerprint


def test_a_family_of_one_kind_is_not_another():
    directory = tiny_nllb_moe("model")
    config = tiny_config_of("m2m_100")
    write_json(directory / "config.json", config)
    with pytest.raises(CheckpointError, match=r"do not fit config\.json"):
        open_model(directory).check()
