"""What every declared family must answer: its record says the same as the class of transformers.

A new family adds a tiny config to `TINY`; every test below then runs on it.
"""

from __future__ import annotations

from typing import Any

import pytest

from prunecli.architectures import FAMILIES, Architecture
from prunecli.checkpoint.declared import config_value
from prunecli.checkpoint.layout import expected_tensors
from prunecli.checkpoint.structure import Structure
from tests.tiny import tiny_config

TINY: dict[str, dict[str, Any]] = {
    "nllb-moe": tiny_config(experts=5, d_model=16, ffn=24, layers=4, sparse_step=2, vocab=40),
}


def stock_model(config: dict[str, Any], family: Architecture) -> Any:
    import torch
    import transformers

    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return getattr(transformers, family.model_class)(made)


def stock_shapes(config: dict[str, Any], family: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stock model's state, tied aliases left out."""
    state = stock_model(config, family).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in family.tied}


@pytest.mark.parametrize("model_type", FAMILIES)
class TestArchitecture:
    def test_every_family_is_tested(self, model_type: str) -> None:
        assert TINY[model_type]["model_type"] == model_type

    def test_declared_tensors_are_those_of_the_stock_model(self, model_type: str) -> None:
        family, config = FAMILIES[model_type], TINY[model_type]
        assert expected_tensors(family, config, Structure()) == stock_shapes(config, family)

    def test_declared_aliases_are_tied_in_the_stock_model(self, model_type: str) -> None:
        family = FAMILIES[model_type]
        state = stock_model(TINY[model_type], family)
        tied = {
            alias: state.get_parameter(alias) is state.get_parameter(n) for alias, n in family.tied.items()
        }
        assert all(tied.values()), tied

    def test_declared_buffers_are_not_stored(self, model_type: str) -> None:
        family = FAMILIES[model_type]
        model = stock_model(TINY[model_type], family)
        buffers = [name for name, _ in model.named_buffers()]
        for ending in family.buffers:
            assert any(name.endswith(ending) for name in buffers)
            assert not any(name.endswith(ending) for name in model.state_dict())

    def test_attributes_are_the_defaults_of_transformers(self, model_type: str) -> None:
        from transformers import AutoConfig

        family = FAMILIES[model_type]
        made = AutoConfig.for_model(model_type)
        assert family.attributes == {key: getattr(made, key) for key in family.attributes}

    def test_every_size_has_a_default(self, model_type: str) -> None:
        family = FAMILIES[model_type]
        specs = [
            spec for stack in family.stacks for spec in (*stack.ffn.tensors, *stack.ffn.router, *stack.norms)
        ]
        for key in {key for spec in specs for key in spec.shape} - {"expert_count"}:
            assert config_value(family, {}, key) is not None

    def test_counts_of_a_pruned_model_are_those_of_its_structure(self, model_type: str) -> None:
        family, config = FAMILIES[model_type], TINY[model_type]
        if not family.expert_count:
            pytest.skip("no experts")
        full = expected_tensors(family, config, Structure())
        first = next(
            f"{stack.layers.format(layer=layer)}.{stack.ffn.name}"
            for stack in family.stacks
            for layer in range(config[stack.depth])
            if f"{stack.layers.format(layer=layer)}.{stack.ffn.name}.{stack.ffn.router[0].name}" in full
        )
        pruned = expected_tensors(family, config, Structure({first: (1, 4)}, {first: 5}))
        assert {name.removeprefix(first) for name in set(full) - set(pruned)} == {
            f".{family.stacks[0].ffn.expert}.{spec.name}".format(expert=expert)
            for expert in (2, 3, 4)
            for spec in family.stacks[0].ffn.tensors
        }


def test_optional_tensors_exist_where_the_config_asks_for_them() -> None:
    family, config = FAMILIES["nllb-moe"], {**TINY["nllb-moe"], "router_bias": True}
    expected = expected_tensors(family, config, Structure())
    assert expected == stock_shapes(config, family)
    assert expected["model.decoder.layers.3.ffn.router.classifier.bias"] == (5,)


def test_a_stack_without_sparse_layers() -> None:
    family, config = FAMILIES["nllb-moe"], {**TINY["nllb-moe"], "decoder_sparse_step": 0}
    assert expected_tensors(family, config, Structure()) == stock_shapes(config, family)
