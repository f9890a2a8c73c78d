"""Private names of transformers and torch that prunecli uses: all of them, since a release may move any.

`tests/test_private.py` has a test for each, and one that finds private names in other modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

OVERRIDDEN = ("_apply", "_save_checkpoint")
"""Methods of `nn.Module` and of transformers' `Trainer` that classes of prunecli override."""

UNEXPECTED = "_keys_to_ignore_on_load_unexpected"
"""Attribute of a model class: patterns of names that transformers does not warn about when it loads a file."""

UNSAVED = "_keys_to_ignore_on_save"
"""Attribute of a model class: names of tensors that it computes, and never writes."""

MAY_LACK = "_keys_to_ignore_on_load_missing"
"""Attribute of a model class: patterns of names of tensors that files need not hold."""

UNFINISHED = "_beam_search_has_unfinished_sequences"
"""Method of a model that beam search asks after each step whether a sentence can still improve."""

ATTENTION_FUNCTION = "_attn_implementation"
"""Attribute of a config: the name of the attention function that a model calls."""

PACKED_ROWS = 32
"""Number of rows that the blocks of a packed weight are chosen for: the same from 2 to hundreds."""


def model_from_config(model_class: Any, config: Any, **options: Any) -> Any:
    """A model of any class of transformers, without pretrained weights. `from_config` exists on Auto classes only."""
    from transformers.integrations import deepspeed

    # With ZeRO-3, transformers would shard the model here, and draw its weights.
    sharding, deepspeed._hf_deepspeed_config_weak_ref = deepspeed._hf_deepspeed_config_weak_ref, None
    try:
        return model_class._from_config(config, **options)
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = sharding


def with_special_floats(config_class: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json with infinities and NaN in place of the objects that transformers writes for them."""
    decoded: dict[str, Any] = config_class._decode_special_floats(dict(values))
    return decoded


def init_weights(model: Any, module: nn.Module) -> None:
    """Draw or compute the weights and buffers of one module by the rule of the model's class."""
    model._init_weights(module)


def keep_value(tensor: Any) -> None:
    """Mark a parameter that was read, so that `init_weights` leaves it."""
    tensor._is_hf_initialized = True


def float32_parts(model: Any, dtype: torch.dtype) -> set[str]:
    """Parts of names of the parameters that the class keeps in float32 if the model is loaded in `dtype`."""
    return {*model._get_dtype_plan(dtype)}


def undivided_modules(model: Any) -> list[str]:
    """Names of the classes of modules that must stay on one device."""
    return [*(model._no_split_modules or ())]


def unmoved_arguments(model: Any) -> list[str]:
    """Names of the arguments that accelerate does not move between devices."""
    return [*(model._skip_keys_device_placement or ())]


def reorders_own_cache(model: Any) -> bool:
    """Whether the class of a model reorders the cache of beam search itself."""
    return hasattr(model, "_reorder_cache")


def is_of_experts(module: Any) -> bool:
    """Whether a module has what `use_experts_implementation` gives modules of experts."""
    given = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
    return all(hasattr(module, attribute) for attribute in given)


def can_replace_experts(model: Any) -> bool:
    """Whether a model has modules of experts, and its class lets another function run them."""
    return any(map(is_of_experts, model.modules())) and bool(model._can_set_experts_implementation())


def apply_gate(experts: Any, hidden: Tensor) -> Tensor:
    """The activation of a stock module of experts, for the outputs of gate and up projection side by side."""
    result: Tensor = experts._apply_gate(hidden)
    return result


def switch_language_side(tokenizer: Any, *, is_target: bool) -> None:
    """Have a slow tokenizer of a translation model read text of the target or the source language."""
    (tokenizer._switch_to_target_mode if is_target else tokenizer._switch_to_input_mode)()


def tensor_version(tensor: Tensor) -> int:
    """Number of writes to a tensor."""
    return tensor._version


def fake_tensors() -> Any:
    """A context within which `torch.load` makes tensors without values that know their offsets in the file."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def pytree() -> Any:
    """torch's module of functions for trees of tuples, lists and dictionaries."""
    from torch.utils import _pytree

    return _pytree


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`rows W^T + b` by oneDNN on a CPU; no gradients.

    Args:
        rows: `[..., in]`.
        weight: `[out, in]`, contiguous, or packed by `onednn_packed`.
        bias: `[out]`, or None.
    """
    import torch

    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def onednn_packed(weight: Tensor) -> Tensor:
    """A copy of `weight` `[out, in]` in the blocks that oneDNN multiplies by.

    The copy has the type and the shape of `weight`, and `to_dense()`; its bytes cannot be read otherwise.
    """
    import torch

    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def onednn_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def int8_linear(rows: Tensor, packed: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Multiply bytes by an `int8_packed` matrix.

    Args:
        rows: `[..., in]` uint8.
        packed: `[out, in]`.
        scale: `[out]`, float32 factor for each row of the matrix.
        offset: `[out]` float32, added to the products.

    Returns:
        `[..., out]` float32.
    """
    import torch

    no_zero_points = torch.empty(0, dtype=torch.int32, device="cpu")
    weight, output = (packed, scale, no_zero_points), (1.0, 0, torch.float32)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, 0, *weight, offset, *output, "none", [], ""
    )
    return product


def int8_packed(values: Tensor) -> Tensor:
    """A matrix of bytes `[out, in]` in the blocks that oneDNN multiplies by."""
    import torch

    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    return packed


def cpu_has(*instructions: str) -> bool:
    """Whether this CPU has one of these instruction sets: "avx512_bf16", "amx_tile", "vnni"."""
    import torch

    return any(getattr(torch.cpu, f"_is_{name}_supported")() for name in instructions)
