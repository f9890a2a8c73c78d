from pathlib import Path

import pytest

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from prunecli.model.parts import FfnLayer, describe_parts
from prunecli.model.structure import KEY, Structure
from tests.families import tiny_family
from tests.structures import axes_of
from tests.tiny import change_config, tiny_nllb_moe

ENCODER = [f"model.encoder.layers.{number}" for number in range(3)]
DECODER = [f"model.decoder.layers.{number}" for number in range(2)]


def layers_of(directory: Path, structure: Structure) -> list[FfnLayer]:
    return [*open_model(tiny_family(directory, "bart", prunecli=structure.to_json())).layout.ffns]


@pytest.mark.parametrize(
    ("removed", "shared", "widths", "says"),
    [
        (["model.encoder.layers.3"], {}, {}, r"names model\.encoder\.layers\.3, which is no FFN"),
        (["model.encoder.layers.0.fc1"], {}, {}, "which is no FFN or attention"),
        ([], {ENCODER[0]: "model.layers.0"}, {}, r"names model\.layers\.0, which is no FFN"),
        ([], {}, {f"{ENCODER[0]}.self_attn": 8}, r"names .*\.self_attn, which is no FFN of the model"),
        ([], {ENCODER[0]: ENCODER[0]}, {}, "shares with .*, which is shared"),
        ([], {ENCODER[0]: ENCODER[1], ENCODER[1]: ENCODER[2]}, {}, "1, which is shared"),
        ([], {ENCODER[0]: ENCODER[1], ENCODER[1]: ENCODER[0]}, {}, "which is shared"),
        ([ENCODER[1]], {DECODER[0]: ENCODER[1]}, {}, r"layers\.1, which is removed"),
        ([], {ENCODER[0]: f"{ENCODER[1]}.self_attn"}, {}, "which is of another kind"),
        ([], {f"{DECODER[0]}.encoder_attn": f"{DECODER[1]}.self_attn"}, {}, "which is of another kind"),
    ],
)
def test_what_cannot_be(removed, shared, widths, says):
    with pytest.raises(CheckpointError, match=says):
        layers_of("model", Structure(shared=shared, removed=frozenset(removed), widths=widths))


@pytest.mark.parametrize(
    "changes",
    [
        {"removed": ["model.encoder.layers.1.ffn"]},
        {"shared": {"model.encoder.layers.1.ffn": "model.encoder.layers.3.ffn"}},
        {"shared": {"model.encoder.layers.0.ffn": "model.encoder.layers.3.ffn"}},
        {"widths": {"model.encoder.layers.3.ffn": 8}},
    ],
)
def test_a_mixture_of_experts_stays(changes):
    structure = {"version": 4, **changes}
    with pytest.raises(CheckpointError, match=r"tiny: config.json changes .*: a mixture of experts can be"):
        open_model(tiny_nllb_moe("tiny", config={"prunecli": structure})).layout.ffns


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        (Structure(), ""),
        (
            Structure(
                shared=dict.fromkeys(ENCODER[1:], ENCODER[0]),
                removed=frozenset(DECODER),
                widths={ENCODER[0]: 49152},
            ),
            "encoder 0 of width 49,152; encoder 1-2 share layer 0's; decoder 0-1 removed",
        ),
        (
            Structure(shared=dict.fromkeys((ENCODER[0], ENCODER[2], DECODER[1]), ENCODER[1])),
            "encoder 0, 2 share layer 1's; decoder 1 shares encoder 1's",
        ),
    ],
)
def test_description(structure, says):
    assert describe_parts(layers_of("model", structure), structure.widths) == says


@pytest.mark.parametrize(
    ("kind", "name", "ids", "of", "said"),
    [
        (
            "head",
            "model.encoder.layers.0.self_attn",
            (2,),
            2,
            "names heads .* of model.*self_attn, which had 2",
        ),
        ("head", "model.encoder.layers.0.self_attn", (0, 0), 2, "names heads .*, which had 2"),
        ("expert", "model.encoder.layers.1.ffn", (1, 1), 8, "names 2 of 8 as kept"),
        ("expert", "model.encoder.layers.1.ffn", (1, 8), 8, "names 2 of 8 as kept"),
    ],
)
def test_units_that_cannot_be(kind, name, ids, of, said):
    change_config(tiny_nllb_moe("model"), **{KEY: Structure(axes_of(kind, {name: ids}, of)).to_json()})
    checkpoint = open_model("model")
    with pytest.raises(CheckpointError, match=said):
        checkpoint.layout.attentions if kind == "head" else checkpoint.require_mixtures()
