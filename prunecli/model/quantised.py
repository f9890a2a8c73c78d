"""Quantised weights: which of a checkpoint's tensors are one matrix, known by their names, types and shapes.

What config.json says of them is read here too.

| scheme | tensors of a module `m` | published as |
| --- | --- | --- |
| scaled | `m.weight` float8 or int8, `m.weight_scale_inv`, `m.weight_scale` or `m.SCB` | fp8, compressed-tensors |
| packed | `m.weight_packed` int32, `m.weight_scale`, perhaps `m.weight_zero_point`, `m.weight_g_idx` | the same |
| gptq, awq | `m.qweight` int32, `m.scales`, perhaps `m.qzeros`, `m.g_idx` | gptq, awq, auto-round |
| nvfp4 | `m.weight_packed` or `m.weight` uint8, `m.weight_scale` float8, one scale more | modelopt |
| mxfp4 | `w_blocks` and `w_scales` uint8, of the parameter `w` of all experts | mxfp4 |
| bitsandbytes | `m.weight` uint8, `m.weight.absmax`, … | bitsandbytes, 4 bits |

Nothing is decoded here: see `prunecli.modules.dequantised`.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prunecli.errors import CheckpointError
from prunecli.model.declared import text_config
from prunecli.tensors.dtypes import COMPUTED, parse_dtype
from prunecli.tensors.reader import TensorInfo

KEYS = ("quantization_config", "compression_config", "quantization")
"""Of config.json: transformers', compressed-tensors' of old, MLX's."""

SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Modelopt's, AutoGPTQ's and AutoAWQ's settings, beside config.json or in place of what it says."""

Scheme = Literal["scaled", "packed", "gptq", "awq", "nvfp4", "mxfp4", "bitsandbytes"]

WORD = 32
"""Bits of the integers that several values are packed into."""

MXFP4_GROUP = 32
NVFP4_GROUP = 16
"""Values of a row that share a scale."""

SCALES = ("weight_scale_inv", "weight_scale", "SCB")
"""Of a float8 or int8 `weight`, by its name in the module."""

COMPANIONS = frozenset(
    (
        *SCALES,
        *("weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        *("weight_format", "scales", "qzeros", "g_idx", "activation_scale", "output_scale"),
        *("input_scale", "input_global_scale", "input_zero_point"),
    )
)
"""What lies beside the values of a module."""

BITSANDBYTES = (
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map"),
    *("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"),
)
"""What lies below a `weight` of 4 bits."""

OF_ATTENTION = re.compile(r"\.(?:[qkv]|kv|prob_output)_(?:cache_)?scale$")
"""Scales of what an attention caches or multiplies: of no weight."""

Tensors = Mapping[str, TensorInfo]
Described = tuple[tuple[int, ...], Scheme, Mapping[str, str], tuple[int, int], int, int]
"""Fields of a `QuantisedWeight` but its name."""

Blocks = dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]]
"""(Shape of values, shape of their scales) -> rows and columns that share one."""

REMEDY = "config.json and the weights are not of one checkpoint, or a file is damaged; copy both again."


class QuantisedWeight(NamedTuple):  # as `TensorInfo`
    """A matrix, or one for each expert, that is stored quantised.

    Attributes:
        name: that it would have otherwise: "model.layers.0.mlp.up_proj.weight".
        shape: of its values; None: shapes alone do not tell (bitsandbytes).
        scheme: how it is stored.
        parts: role -> full name of a tensor that it is stored in: "values", "scale", and companions by their names.
        block: rows and columns of a matrix that share a scale.
        bits: of a value.
        zero_offset: added to stored zero points.
    """

    name: str
    shape: tuple[int, ...] | None
    scheme: Scheme
    parts: Mapping[str, str]
    block: tuple[int, int] = (1, 1)
    bits: int = 4
    zero_offset: int = 0


def find_quantised(tensors: Tensors, config: Mapping[str, Any]) -> dict[str, QuantisedWeight]:
    """Name -> quantised weight, of all that these tensors hold.

    Args:
        tensors: by full name.
        config: config.json: types and shapes leave open how zero points are stored, and how large blocks are.

    Raises:
        CheckpointError: the scales of one are not of its shape, or absent.
    """
    settings = settings_of(config)
    others = []
    companions: dict[str, dict[str, str]] = {}
    for name in tensors:
        owner, _, own = name.rpartition(".")
        if own in COMPANIONS:
            companions.setdefault(owner, {})[own] = name
        else:
            others.append((name, owner, own))
    found = {}
    blocks: Blocks = {}
    for name, owner, own in others:
        info = tensors[name]
        more = companions.get(owner, {})
        weight = None
        is_nvfp4 = info.dtype == "U8" and (own == "weight_packed" or "weight_scale_2" in more)
        if own in ("qweight", "weight_packed") or (own == "weight" and is_nvfp4):
            make = _grouped if own == "qweight" else _nvfp4 if is_nvfp4 else _packed
            scale = "scales" if own == "qweight" else "weight_scale"
            if scale not in more:
                raise _unfit(f"{name} has no {scale} beside it")
            parts = {"values": name, "scale": more[scale]}
            parts |= {role: part for role, part in more.items() if role != scale}
            weight = QuantisedWeight(f"{owner}.weight", *make(tensors, parts, settings))
        elif name.endswith("_blocks") and info.dtype == "U8":
            weight = _mxfp4(tensors, name.removesuffix("_blocks"), settings)
        elif info.dtype in ("F8_E4M3", "F8_E5M2", "I8"):
            weight = _scaled(tensors, name, more, settings, blocks)
        elif own == "weight" and f"{name}.absmax" in tensors:
            below = {part: full for part in BITSANDBYTES if (full := f"{name}.{part}") in tensors}
            weight = QuantisedWeight(name, None, "bitsandbytes", {"values": name, **below})
        if weight is not None:
            found[weight.name] = weight
    return found


def owners_of(weights: Iterable[QuantisedWeight]) -> dict[str, QuantisedWeight]:
    """Full name of each tensor that a quantised weight is stored in -> the weight."""
    return {part: weight for weight in weights for part in weight.parts.values()}


def values_of(
    tensors: Tensors,
    weights: Mapping[str, QuantisedWeight],
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, TensorInfo]:
    """The tensors as they would be unquantised, in the same order, the weights of the type `dtype`.

    Args:
        tensors: as they are stored.
        weights: those among them that are quantised.
        dtype: safetensors type.
        shapes: of weights whose shape their own tensors do not tell.
    """
    owners = owners_of(weights.values())
    seen = {}
    for name, info in tensors.items():
        weight = owners.get(name)
        if weight is None:
            if not (weights and OF_ATTENTION.search(name)):
                seen[name] = info
        elif weight.name not in seen:
            # Where nothing tells the shape, all values in one row: two a byte.
            in_a_row = (2 * tensors[weight.parts["values"]].nbytes,)
            shape = weight.shape or shapes.get(weight.name) or in_a_row
            seen[weight.name] = TensorInfo(weight.name, dtype, shape)
    return seen


def _grouped(tensors: Tensors, parts: Mapping[str, str], settings: Mapping[str, Any]) -> Described:
    """GPTQ's, packed along the inputs, or AWQ's, along the outputs: `[inputs, outputs]` both."""
    values, scales = tensors[parts["values"]], tensors[parts["scale"]].shape
    zeros = tensors[parts["qzeros"]].shape if "qzeros" in parts else None
    bits = _count(settings.get("bits")) or _count(settings.get("w_bit")) or 4
    if zeros is not None and len(zeros) == len(scales) == 2 and scales[1]:
        bits = zeros[1] * WORD // scales[1]
    if len(values.shape) != 2 or len(scales) != 2 or bits not in (2, 4, 8):
        raise _unfit(f"{values.name} {list(values.shape)} is packed in a way that prunecli does not know")
    per_word = WORD // bits
    along_inputs = values.shape[1] == scales[1]
    rows, columns = values.shape
    inputs, outputs = (rows * per_word, columns) if along_inputs else (rows, columns * per_word)
    if outputs != scales[1] or not 0 < scales[0] <= inputs:
        raise _unfit(f"{values.name} {list(values.shape)} does not fit its scales {list(scales)}")
    _require(tensors, parts, "qzeros", (scales[0], -(-outputs * bits // WORD)))
    _require(tensors, parts, "g_idx", (inputs,), (0,))
    size = _count(settings.get("group_size")) or inputs
    if -(-inputs // size) != scales[0]:
        raise _unfit(
            f"{values.name}: scales {list(scales)} of {inputs} inputs are not of groups of {size}, as config.json says"
        )
    newer = str(settings.get("checkpoint_format", "gptq")).endswith("v2")
    # GPTQ's first format stores zero points less one.
    offset = int(along_inputs and not newer)
    scheme: Scheme = "gptq" if along_inputs else "awq"
    return (outputs, inputs), scheme, parts, (1, size), bits, offset


def _packed(tensors: Tensors, parts: Mapping[str, str], settings: Mapping[str, Any]) -> Described:
    values, scale = tensors[parts["values"]], tensors[parts["scale"]].shape
    if len(values.shape) != 2 or len(scale) != 2:
        raise _unfit(f"{values.name} {list(values.shape)} has scales of the shape {list(scale)}")
    rows, words = values.shape
    for stated in weight_settings(settings):
        bits, size = stated.get("num_bits"), stated.get("group_size")
        if bits not in (2, 4, 8) or stated.get("type", "int") != "int":
            continue
        most = words * WORD // bits
        if not isinstance(size, int) or size <= 0:
            size = most
        columns = scale[1] * size if scale[1] * size <= most else most
        if scale[0] in (1, rows) and -(-columns * bits // WORD) == words and -(-columns // size) == scale[1]:
            _require(tensors, parts, "weight_zero_point", (-(-scale[0] * bits // WORD), scale[1]))
            _require(tensors, parts, "weight_g_idx", (columns,), (0,))
            block = (1 if scale[0] == rows else rows, size)
            return (rows, columns), "packed", parts, block, bits, 0
    raise _unfit(
        f"{values.name} {list(values.shape)} with scales {list(scale)} is not what config.json describes"
    )


def _nvfp4(tensors: Tensors, parts: Mapping[str, str], _settings: Mapping[str, Any]) -> Described:
    values = tensors[parts["values"]]
    shape = (*values.shape[:-1], *(2 * size for size in values.shape[-1:]))
    if not shape or tensors[parts["scale"]].shape != (*shape[:-1], shape[-1] // NVFP4_GROUP):
        raise _unfit(f"{values.name} {list(values.shape)} does not fit its scales")
    for role in ("weight_scale_2", "weight_global_scale"):
        if role in parts and not math.prod(tensors[parts[role]].shape):
            raise _unfit(f"{parts[role]} holds no scale")
    return shape, "nvfp4", parts, (1, NVFP4_GROUP), 4, 0


def _mxfp4(tensors: Tensors, name: str, settings: Mapping[str, Any]) -> QuantisedWeight | None:
    """Values `[experts, outputs, groups, 16]`; the parameter is `[experts, inputs, outputs]`."""
    parts = {"values": f"{name}_blocks", "scale": f"{name}_scales"}
    values, scale = tensors[parts["values"]], tensors.get(parts["scale"])
    if scale is None:
        if settings.get("quant_method") == "mxfp4":
            raise _unfit(f"{values.name} is quantised, as config.json says, and has no scale")
        return None
    if len(values.shape) != 4 or values.shape[3] * 2 != MXFP4_GROUP or scale.shape != values.shape[:3]:
        raise _unfit(f"{values.name} {list(values.shape)} does not fit its scales {list(scale.shape)}")
    experts, outputs, groups, _ = values.shape
    return QuantisedWeight(name, (experts, groups * MXFP4_GROUP, outputs), "mxfp4", parts, (1, MXFP4_GROUP))


def _scaled(
    tensors: Tensors,
    name: str,
    more: Mapping[str, str],
    settings: Mapping[str, Any],
    blocks: Blocks,
) -> QuantisedWeight | None:
    """Describe a weight with scales; None if nothing scales the numbers."""
    companions = {**more} if name.endswith(".weight") else {}
    if (stacked := f"{name}_scale_inv") in tensors:
        companions["weight_scale_inv"] = stacked
    for own in SCALES:
        if own in companions:
            break
    else:
        if settings and tensors[name].dtype.startswith("F8") and "scale" not in name:
            raise _unfit(f"{name} is quantised, as config.json says, and has no scale")
        return None
    scale, values = tensors[companions[own]], tensors[name]
    parts = {"values": name, "scale": companions.pop(own), **companions}
    shapes = values.shape, scale.shape
    if (block := blocks.get(shapes)) is None:
        block = blocks[shapes] = _block(values, scale, settings)
    return QuantisedWeight(name, values.shape, "scaled", parts, block, 8)


def _block(values: TensorInfo, scale: TensorInfo, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a matrix that share one of the scales."""
    *experts, rows, columns = (1, 1, *values.shape)[-max(len(values.shape), 2) :]
    grid = scale.shape
    if experts and grid[: len(experts)] == tuple(experts):
        grid = grid[len(experts) :]
    if math.prod(grid) == 1:
        return rows, columns
    if math.prod(grid) == rows and grid[0] == rows:
        return 1, columns
    stated = settings.get("weight_block_size") or next(
        (own.get("block_structure") for own in weight_settings(settings) if own.get("block_structure")), None
    )
    block = tuple(map(_count, stated)) if isinstance(stated, (list, tuple)) and len(stated) == 2 else None
    if block is not None and not all(block):
        raise _unfit(f"config.json: {stated} are no rows and columns of a block")
    if block is None and len(grid) == 2 and all(grid) and not (rows % grid[0] or columns % grid[1]):
        block = rows // grid[0], columns // grid[1]
    if (
        block is None
        or tuple(-(-size // of) for size, of in zip((rows, columns), block, strict=True)) != grid
    ):
        raise _unfit(
            f"{values.name} {list(values.shape)} has scales of the shape {list(scale.shape)}"
            + (f", not of blocks of {list(block)}, as config.json says" if block else "")
        )
    return block[0], block[1]


def _count(stated: Any) -> int:
    """A number that config.json states; 0: it is none, or not above 0."""
    return stated if isinstance(stated, int) and stated > 0 else 0


def _require(tensors: Tensors, parts: Mapping[str, str], role: str, *shapes: tuple[int, ...]) -> None:
    """Refuse a part, where there is one, of none of these shapes."""
    if role in parts and tensors[parts[role]].shape not in shapes:
        values, found = tensors[parts["values"]], tensors[parts[role]]
        raise _unfit(f"{found.name} {list(found.shape)} does not fit {values.name} {list(values.shape)}")


def _unfit(message: str) -> CheckpointError:
    return CheckpointError(message, REMEDY)


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantisation settings of config.json or of its part on a language model; empty if there are none."""
    stated = (place.get(key) for place in (config, text_config(config)) for key in KEYS)
    return next((value for value in stated if isinstance(value, Mapping)), {})


def method_of(config: Mapping[str, Any]) -> str:
    """The method that config.json names ("awq"); "" where it names none."""
    settings = settings_of(config)
    return str(settings.get("quant_method") or "of unknown method") if settings else ""


def value_dtype(config: Mapping[str, Any]) -> str:
    """The safetensors type that quantised weights stand for: that of config.json, else bfloat16."""
    stated = config.get("dtype") or config.get("torch_dtype")
    known = stated.removeprefix("torch.") if isinstance(stated, str) else ""
    return parse_dtype(known) if known in COMPUTED else "BF16"


def renamed_settings(config: Any, rename: Callable[[str], str | None]) -> Any:
    """`config` with other names of modules in what it, or a part of it, says of the quantisation."""
    if not isinstance(config, dict):
        return config
    return {
        key: renamed(value, rename) if key in KEYS else renamed_settings(value, rename)
        for key, value in config.items()
    }


def renamed(value: Any, rename: Callable[[str], str | None]) -> Any:
    """JSON with other texts, keys and items of lists alike.

    Args:
        rename: the new form of a text; None: it is left out.
    """
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, list):
        return [new for item in value if (new := renamed(item, rename)) is not None or item is None]
    if isinstance(value, dict):
        pairs = ((rename(key), renamed(item, rename), item) for key, item in value.items())
        return {key: new for key, new, item in pairs if key is not None and (new is not None or item is None)}
    return value


def weight_settings(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of compressed-tensors for weights, group by group of modules."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield weights
