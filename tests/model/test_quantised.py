"""Which tensors are one quantised weight; what does not fit together is refused."""

import pytest

from prunecli.errors import CheckpointError
from prunecli.model.quantised import find_quantised, method_of, renamed_settings, values_of
from prunecli.tensors.reader import TensorInfo

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
PACKED = {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}
FLOATS = ("m.weight", "F8_E4M3", (256, 512))
WORDS = ("m.qweight", "I32", (64, 16))
PACKED_WORDS = ("m.weight_packed", "I32", (16, 8))
BLOCKS = ("e.up_blocks", "U8", (4, 64, 2, 16))


def infos(*tensors: tuple[str, str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, dtype, shape) for name, dtype, shape in tensors}


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (
            [FLOATS, ("m.weight_scale_inv", "F32", (4, 8))],
            FP8,
            r"m.weight \[256, 512\] has scales of the shape \[4, 8\], not of blocks of \[128, 128\]",
        ),
        *(
            ([(name, *FLOATS[1:])], FP8, f"{name} is quantised, as config.json says, and has no scale")
            for name in ("m.weight", "m.experts.up_proj")
        ),
        ([WORDS], GPTQ, "m.qweight has no scales beside it"),
        (
            [WORDS, ("m.scales", "F16", (8, 16)), ("m.qzeros", "I32", (8, 2))],
            GPTQ,
            r"scales \[8, 16\] of 512 inputs are not of groups of 128",
        ),
        (
            [WORDS, ("m.scales", "F16", (4, 24)), ("m.qzeros", "I32", (4, 3))],
            GPTQ,
            r"m.qweight \[64, 16\] does not fit its scales \[4, 24\]",
        ),
        ([PACKED_WORDS], PACKED, "m.weight_packed has no weight_scale beside it"),
        (
            [PACKED_WORDS, ("m.weight_scale", "BF16", (16, 4))],
            PACKED,
            r"m.weight_packed \[16, 8\] with scales \[16, 4\] is not what config.json describes",
        ),
        (
            [("m.weight_packed", "U8", (16, 8)), ("m.weight_scale", "F8_E4M3", (16, 2))],
            {},
            r"m.weight_packed \[16, 8\] does not fit its scales",
        ),
        (
            [BLOCKS, ("e.up_scales", "U8", (3, 64, 2))],
            {},
            r"e.up_blocks \[4, 64, 2, 16\] does not fit its scales \[3, 64, 2\]",
        ),
        (
            [BLOCKS],
            {"quant_method": "mxfp4"},
            "e.up_blocks is quantised, as config.json says, and has no scale",
        ),
        *(
            (
                [FLOATS, ("m.weight_scale_inv", "F32", (2, 4))],
                {"quant_method": "fp8", "weight_block_size": size},
                "are no rows and columns of a block",
            )
            for size in ([0, 128], ["a", 128], [-1, [2]])
        ),
        (
            [WORDS, ("m.scales", "F16", (8, 16)), ("m.qzeros", "I32", ())],
            {"bits": "four"},
            r"m.qzeros \[\] does not fit m.qweight \[64, 16\]",
        ),
        *(
            (
                [PACKED_WORDS, ("m.weight_scale", "BF16", (16, 2)), (f"m.{part}", "I32", (16, 2))],
                PACKED,
                rf"m.{part} \[16, 2\] does not fit m.weight_packed \[16, 8\]",
            )
            for part in ("weight_zero_point", "weight_g_idx")
        ),
        (
            [
                ("m.weight", "U8", (4, 8)),
                ("m.weight_scale", "F8_E4M3", (4, 1)),
                ("m.weight_scale_2", "F32", (0,)),
            ],
            {},
            "m.weight_scale_2 holds no scale",
        ),
        (
            [("m.weight", "U8", ()), ("m.weight_scale", "F8_E4M3", ()), ("m.weight_scale_2", "F32", ())],
            {},
            r"m.weight \[\] does not fit its scales",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tensors, settings, message):
    with pytest.raises(CheckpointError, match=message):
        find_quantised(infos(*tensors), {"quantization_config": settings})


def test_companions_belong_to_their_weight():
    tensors = infos(
        ("a.weight", "F8_E4M3", (64, 64)),
        ("a.weight_scale", "F32", ()),
        ("a.input_scale", "F32", ()),
        ("a.bias", "BF16", (64,)),
        ("attention.k_scale", "F32", ()),
        ("b.weight", "U8", (512, 1)),
        ("b.weight.absmax", "U8", (64,)),
        ("b.weight.quant_state.bitsandbytes__nf4", "U8", (80,)),
        ("c.weight", "BF16", (64, 64)),
        ("d.weight", "F8_E4M3", (4, 32, 64)),
        ("d.weight_scale_inv", "F32", (4, 2, 1)),
    )
    weights = find_quantised(tensors, {"quantization_config": {"weight_block_size": [16, 64]}})
    assert {name: (weight.scheme, set(weight.parts.values())) for name, weight in weights.items()} == {
        "a.weight": ("scaled", {"a.weight", "a.weight_scale", "a.input_scale"}),
        "b.weight": (
            "bitsandbytes",
            {"b.weight", "b.weight.absmax", "b.weight.quant_state.bitsandbytes__nf4"},
        ),
        "d.weight": ("scaled", {"d.weight", "d.weight_scale_inv"}),
    }
    assert weights["d.weight"].block == (16, 64)
    assert values_of(tensors, weights, "BF16", {})["b.weight"].numel == 1024
    plain = values_of(tensors, weights, "BF16", {"b.weight": (32, 32)})
    assert {name: info.shape for name, info in plain.items()} == {
        "a.weight": (64, 64),
        "a.bias": (64,),
        "b.weight": (32, 32),
        "c.weight": (64, 64),
        "d.weight": (4, 32, 64),
    }


def test_settings_lie_in_several_places():
    assert method_of({"text_config": {"quantization_config": {"quant_method": "fp8"}}}) == "fp8"
    assert method_of({"compression_config": {"quant_method": "compressed-tensors"}}) == "compressed-tensors"
    assert method_of({"quantization": {"bits": 4}}) == "of unknown method"
    assert method_of({"quantization_config": None}) == ""


def test_names_change_in_settings_of_a_part_too():
    config = {"text_config": {"layers": "a", "quantization_config": {"ignore": ["a", "b"]}}}
    assert renamed_settings(config, lambda text: {"a": "c", "b": None}.get(text, text)) == {
        "text_config": {"layers": "a", "quantization_config": {"ignore": ["c"]}}
    }
