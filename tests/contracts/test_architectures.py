"""What every declared family must answer: its record says the same as the class of transformers.

Every test below runs on each family of `tests.families.records`, and on further variants of them (other conditions,
other classes).
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from prunecli.architectures import FAMILIES, Architecture
from prunecli.architectures.records import Attention, Stack, TensorSpec
from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from prunecli.model.declared import Sizes
from prunecli.model.layout import resolve
from prunecli.model.parts import within
from prunecli.model.structure import Structure
from tests.families import random_state, stock_model, tiny_config_of, tiny_family
from tests.families import records as families
from tests.tiny import config_of, tiny_config, tiny_nllb_moe, write_json, write_weights

NLLB_MOE = tiny_config(experts=5, d_model=16, ffn=24, layers=4, sparse_step=2, vocab=40)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{case: (case, {}) for case in families.CASES if case != "nllb-moe"},
    "t5-equal-depths": ("t5", {"num_decoder_layers": None}),
    "roberta-classification": ("roberta", {"architectures": ["RobertaForSequenceClassification"]}),
    "xlm-roberta-classification": ("xlm-roberta", {"architectures": ["XLMRobertaForSequenceClassification"]}),
    "bart-classification": ("bart", {"architectures": ["BartForSequenceClassification"]}),
    "distilbert-classification": ("distilbert", {"architectures": ["DistilBertForSequenceClassification"]}),
    "opt-bare": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt-old-norms": ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    "mt5-tied": ("mt5", {"tie_word_embeddings": True}),
    "gpt2-inner": ("gpt2", {"n_inner": 40, "tie_word_embeddings": False}),
    "gpt2-classification": ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}),
    "llama-wide-heads": ("llama", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "llama-one-query-per-key": ("llama", {"num_key_value_heads": None}),
    "mistral-wide-heads": ("mistral", {"head_dim": 8, "sliding_window": 4}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "phi3-one-query-per-key": ("phi3", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    "gemma2-untied": ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
    "llama-classification": ("llama", {"architectures": ["LlamaForSequenceClassification"]}),
}

CASES: dict[str, dict[str, Any]] = {
    "nllb-moe": NLLB_MOE,
    "nllb-moe-router-bias": {**NLLB_MOE, "router_bias": True},
    "nllb-moe-dense-decoder": {**NLLB_MOE, "decoder_sparse_step": 0},
    **{name: tiny_config_of(model_type, **changes) for name, (model_type, changes) in VARIANTS.items()},
}


def family_of(config: dict[str, Any]) -> Architecture:
    return FAMILIES[config["model_type"]]


def tied_in(config: dict[str, Any]) -> dict[str, str]:
    """The aliases that stand for another tensor where config.json says what this one says."""
    family = family_of(config)
    apart = family.loose if not config.get("tie_word_embeddings", True) else ()
    return {alias: name for alias, name in family.tied.items() if alias not in apart}


@functools.cache
def stock(case: str) -> Any:
    """The stock model of one of `CASES`."""
    return stock_model(CASES[case])


def is_buffer(name: str, family: Architecture) -> bool:
    return any(name.endswith(f".{ending}") for ending in family.buffers)


def stock_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stock model's state, without tied aliases, task heads and what it computes."""
    family, tied = family_of(config), tied_in(config)
    state = stock_model(config).state_dict()
    return {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if name not in tied and not name.startswith(family.extras) and not is_buffer(name, family)
    }


def stacks_and_attentions(family: Architecture) -> Iterator[tuple[Stack, Attention]]:
    for stack in family.stacks:
        for attention in stack.attentions:
            yield stack, attention


def all_specs(family: Architecture) -> Iterator[TensorSpec]:
    yield from family.tensors
    for stack in family.stacks:
        yield from (*stack.norms, *stack.ffn.tensors, *stack.ffn.router)
        for attention in stack.attentions:
            yield from attention.tensors


@pytest.mark.parametrize("case", CASES)
class TestDeclaredTensors:
    def test_are_those_of_the_stock_model(self, case):
        config = CASES[case]
        assert resolve(family_of(config), config, Structure()).shapes == stock_shapes(config)

    def test_aliases_are_tied_in_the_stock_model(self, case):
        config, model = CASES[case], stock(case)
        held = model.state_dict()
        for alias, name in tied_in(config).items():
            if alias in held:  # a class without that task head lacks it
                assert model.get_parameter(alias) is model.get_parameter(name), alias

    def test_every_alias_of_the_stock_model_is_declared(self, case):
        model = stock(case)
        assert set(model.all_tied_weights_keys) <= set(family_of(CASES[case]).tied)

    def test_every_buffer_of_the_stock_model_is_declared(self, case):
        model = stock(case)
        stored = model.state_dict()
        computed = [name for name, _ in model.named_buffers() if name not in stored]
        assert [name for name in computed if not is_buffer(name, family_of(CASES[case]))] == []

    def test_declared_buffers_are_not_stored(self, case):
        """Or are frozen parameters, which the model computes where they are not."""
        model = stock(case)
        stored = set(model.state_dict()) - set(model._keys_to_ignore_on_save or ())
        stored -= {name for name, held in model.named_parameters() if not held.requires_grad}
        assert [name for name in stored if is_buffer(name, family_of(CASES[case]))] == []

    def test_heads_divide_their_axes(self, case):
        config, family = CASES[case], family_of(CASES[case])
        for _, attention in stacks_and_attentions(family):
            heads = Sizes(family, config).count(attention.heads)
            assert heads > 1
            for spec in attention.tensors:
                if spec.units is not None:
                    share = heads * sum(Sizes(family, config).count(width) for width in spec.units.blocks)
                    assert Sizes(family, config).count(spec.shape[spec.units.axis]) % share == 0

    def test_hidden_units_lie_on_the_axes_that_grow_with_the_width(self, case):
        config, family = CASES[case], family_of(CASES[case])
        before = stock_shapes(config)
        wider = {**config, **{stack.ffn.width: 200 for stack in family.stacks}}
        after = stock_shapes(wider)
        grown = {
            name: axis
            for name in before
            for axis, size in enumerate(before[name])
            if size != after[name][axis]
        }
        declared = {}
        for stack in family.stacks:
            for number in range(Sizes(family, config).count(stack.depth)):
                ffn = within(stack.layers.format(layer=number), stack.ffn)
                prefixes = [ffn]
                if family.mixture is not None:
                    experts = range(config["num_experts"])
                    prefixes += [
                        f"{ffn}.{str(family.mixture.expert).format(expert=expert)}" for expert in experts
                    ]
                declared |= {
                    f"{prefix}.{spec.name}": spec.units.axis
                    for prefix in prefixes
                    for spec in stack.ffn.tensors
                    if spec.units is not None and f"{prefix}.{spec.name}" in before
                }
        assert declared == grown

    def test_the_norm_of_an_ffn_is_one_of_the_layers(self, case):
        model = stock(case)
        for stack in family_of(CASES[case]).stacks:
            layer = stack.layers.format(layer=0)
            width = Sizes(family_of(CASES[case]), CASES[case]).count(stack.norms[0].shape[0])
            for norm in stack.ffn.norms:
                weight = model.get_submodule(f"{layer}.{norm}").weight
                assert weight is None if case == "opt-bare" else weight.shape == (width,)
            assert any(spec.name.startswith(stack.ffn.norms) for spec in stack.norms)


def test_every_family_has_a_record_in_the_tests():
    assert set(families.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
class TestDefaults:
    def test_attributes_are_the_defaults_of_transformers(self, model_type):
        family = FAMILIES[model_type]
        made = transformers.AutoConfig.for_model(model_type)
        for key, default in family.attributes.items():
            value = getattr(made, key, None)
            if isinstance(default, str) and value != default:  # it follows from other keys
                assert value in (None, Sizes(family, {}).count(key)), key
            else:
                assert (type(value), value) == (type(default), default), key

    def test_every_size_has_a_default(self, model_type):
        family = FAMILIES[model_type]
        axes = {axis for spec in all_specs(family) for axis in spec.shape} - {"expert_count"}
        axes |= {stack.depth for stack in family.stacks} | {stack.ffn.width for stack in family.stacks}
        axes |= {attention.heads for _, attention in stacks_and_attentions(family)}
        assert all(Sizes(family, {}).count(axis) > 0 for axis in axes)

    def test_the_classes_are_of_transformers(self, model_type):
        family = FAMILIES[model_type]
        found = getattr(transformers, family.model_class)
        assert found.config_class.model_type == model_type
        assert getattr(transformers, family.auto_class)._model_mapping[found.config_class] is found
        for one in family.classes:
            mapped = getattr(transformers, one.auto_class)._model_mapping[found.config_class]
            # Some Auto classes know several of a configuration's classes.
            names = [each.__name__ for each in (mapped if isinstance(mapped, tuple) else (mapped,))]
            assert one.name in names
        assert family.classes[0].auto_class == "AutoModel"
        assert family.model_class in [one.name for one in family.classes]


@pytest.mark.parametrize("case", VARIANTS)
class TestCheckpoints:
    def test_what_the_stock_class_stores_fits(self, case, tmp_path):
        model_type, changes = VARIANTS[case]
        checkpoint = open_model(tiny_family(tmp_path / "model", model_type, **changes))
        checkpoint.check()
        family = family_of(CASES[case])
        other = {name for name in checkpoint.tensors if checkpoint.layout.part(name) == "other"}
        assert other <= {name for name in checkpoint.tensors if name.startswith(family.extras)}

    def test_zeroed_inputs_of_a_head_are_the_zeros_of_its_output(self, case, tmp_path):
        model_type, changes = VARIANTS[case]
        config, family = CASES[case], family_of(CASES[case])
        stock = getattr(transformers, config["architectures"][0])
        model = stock.from_pretrained(tiny_family(tmp_path / "model", model_type, **changes)).eval()
        state = model.state_dict()
        inputs = {"input_ids": torch.tensor([[5, 6, 7, 9, 2]])}
        if len(family.stacks) == 2 and "Classification" not in stock.__name__:
            inputs["decoder_input_ids"] = torch.tensor([[2, 8, 4]])
        for stack, attention in stacks_and_attentions(family):
            heads = Sizes(family, config).count(attention.heads)
            layer = stack.layers.format(layer=0)
            for spec in attention.tensors:
                name = f"{layer}.{spec.name}"
                if spec.units is not None and not spec.name.startswith(attention.output) and name in state:
                    whole = state[name].movedim(spec.units.axis, 0)
                    widths = [Sizes(family, config).count(width) for width in spec.units.blocks]
                    for block in whole.split([len(whole) * width // sum(widths) for width in widths]):
                        block.unflatten(0, (heads, -1))[2] = 0
            seen: list[torch.Tensor] = []
            output = model.get_submodule(f"{layer}.{attention.output}")
            hook = output.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
            with torch.no_grad():
                model(**inputs)
            hook.remove()
            outputs = seen[0].unflatten(-1, (heads, -1)).abs().amax(dim=(0, 1, 3))
            assert [head for head in range(heads) if outputs[head] == 0] == [2]


def older(directory: Path, model_type: str, rename: dict[str, str], more: dict[str, tuple[int, ...]]) -> Path:
    config = config_of(tiny_family(directory, model_type))
    state = random_state(config)
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
        ("roberta", {}, {"roberta.embeddings.position_ids": (1, 66)}),
        ("bart", {"model.": ""}, {"encoder.version": (1,)}),
        ("marian", {}, {"model.encoder.embed_positions.weight": (64, 32)}),
        ("pegasus", {}, {"model.decoder.embed_positions.weight": (64, 32)}),
        ("m2m_100", {}, {"model.decoder.embed_positions.weights": (66, 32)}),
        ("t5", {}, {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": (8, 4)}),
        ("distilbert", {"distilbert.": "", "LayerNorm.weight": "LayerNorm.gamma"}, {}),
        ("opt", {"model.": ""}, {"decoder.version": (1,)}),
        ("gemma3_text", {"model.": "language_model.model."}, {}),
        ("gemma3_text", {"model.": "model.language_model."}, {}),
        ("llama", {}, {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}),
    ],
)
def test_older_checkpoints_are_read(model_type, rename, more, tmp_path):
    checkpoint = open_model(older(tmp_path / "old", model_type, rename, more))
    checkpoint.check()
    expected = set(resolve(FAMILIES[model_type], checkpoint.config, Structure()).shapes)
    extras = {name for name in checkpoint.tensors if name.startswith(FAMILIES[model_type].extras)}
    assert set(checkpoint.tensors) == expected | extras


@pytest.mark.parametrize("model_type", ["bart", "t5", "gpt2", "llama"])
def test_a_tensor_that_no_class_of_the_family_has_is_refused(model_type, tmp_path):
    more = {"model.adapter.weight": (4, 4)}
    checkpoint = open_model(older(tmp_path / "odd", model_type, {}, more))
    with pytest.raises(CheckpointError, match=r"1 unexpected \((model\.)?.*adapter\.weight\)"):
        checkpoint.check()


def test_a_head_count_that_does_not_divide_the_width_is_refused():
    config = tiny_config_of("llama", num_attention_heads=6, num_key_value_heads=6)
    with pytest.raises(CheckpointError, match="hidden_size/num_attention_heads is 32 / 6"):
        resolve(FAMILIES["llama"], config, Structure()).shapes


def test_a_family_of_one_kind_is_not_another(tmp_path):
    directory = tiny_nllb_moe(tmp_path / "model")
    config = tiny_config_of("m2m_100")
    write_json(directory / "config.json", config)
    with pytest.raises(CheckpointError, match=r"do not fit config\.json"):
        open_model(directory).check()
