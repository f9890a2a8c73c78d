"""Where each family's tokens come in and go out, as transformers has it; what a structure makes of it."""

from dataclasses import replace

import pytest

from prunecli.architectures import NLLB_MOE
from prunecli.errors import CheckpointError
from prunecli.model.changes import EmbeddingChange, InputChange, OutputChange
from prunecli.model.checkpoint import open_model
from prunecli.model.declared import Sizes
from prunecli.model.layout import resolve
from prunecli.model.structure import Structure
from tests.families import stock_model
from tests.families.records import FAMILIES, own_branches
from tests.tiny import tiny_config

UNIT = InputChange("define", 4, 12, 2, 2)
CONFIG = tiny_config(experts=4, d_model=32, ffn=48, layers=2, sparse_step=2, vocab=40)
CHANGES = (
    EmbeddingChange(),
    EmbeddingChange(UNIT),
    EmbeddingChange(UNIT, OutputChange()),
    EmbeddingChange(UNIT, OutputChange(4, tied=True)),
    EmbeddingChange(replace(UNIT, cached=True, zero_padding=True), OutputChange(4)),
    EmbeddingChange(output=OutputChange(8)),
)


@pytest.mark.parametrize("case", own_branches(FAMILIES))
def test_are_those_of_the_stock_class(case, models):
    family = FAMILIES[case]
    checkpoint = open_model(models[case])
    tables, model = checkpoint.layout.require_tables(), stock_model(checkpoint.config)
    assert (tables.input, {*tables.aliases}) == (family.input[0], {*family.input[1:]})
    assert tables.output == family.output
    assert (tables.vocabulary, tables.model_dim) == tuple(model.get_input_embeddings().weight.shape)
    assert tables.tensors == {}


@pytest.mark.parametrize("change", CHANGES)
def test_is_written_and_read(change):
    structure = Structure(embedding=change)
    assert Structure.from_json(structure.to_json()).embedding == change
    assert structure.is_stock == (change == EmbeddingChange())


@pytest.mark.parametrize("change", CHANGES)
def test_ties_leave_the_declared_ones_alone(change):
    config, structure = CONFIG, Structure(embedding=change)
    for _ in range(2):
        found = resolve(NLLB_MOE, config, structure).ties
    assert Sizes(NLLB_MOE, config).ties() == {
        "lm_head.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    }
    tied = change.output is not None and change.output.tied
    expected = (
        "model.shared.map.weight" if tied else None if change != EmbeddingChange() else "model.shared.weight"
    )
    assert found.get("lm_head.weight") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (InputChange("define", 5, 12, 2, 2), "cannot be split"),
        (InputChange("define", 40, 48, 2, 2), "above the model's width"),
        (InputChange("odd", 4), "'odd' is no kind of unit"),
    ],
)
def test_dimensions_that_cannot_be(change, message):
    with pytest.raises(CheckpointError, match=message):
        resolve(NLLB_MOE, CONFIG, Structure(embedding=EmbeddingChange(change))).tables


@pytest.mark.parametrize(
    "value",
    [
        {"input": {"map_dim": 4}},
        {"input": {"kind": "define", "map_dim": "4"}},
        {"input": {"kind": "projective", "map_dim": True}},
        {"input": {"kind": "define", "map_dim": 4, "wings": 2}},
        {"middle": {}},
        {"input": 5},
        ["input"],
        {"output": {"tied": 1}},
        {"output": {"tied": True}},
        {
            "input": {"kind": "projective", "map_dim": 4, "cached": True},
            "output": {"map_dim": 4, "tied": True},
        },
        {"input": {"kind": "projective", "map_dim": 4}, "output": {"map_dim": 5, "tied": True}},
    ],
)
def test_a_damaged_value(value):
    with pytest.raises(CheckpointError, match='the value under "prunecli" is damaged'):
        Structure.from_json({"version": 1, "embedding": value})
