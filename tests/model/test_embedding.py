"""Where each family's tokens come in and go out, as transformers has it; what a structure makes of it."""

from dataclasses import replace

import pytest

from prunecli.architectures import FAMILIES
from prunecli.errors import CheckpointError
from prunecli.model.changes import EmbeddingChange, InputChange, OutputChange
from prunecli.model.declared import Sizes
from prunecli.model.layout import resolve
from prunecli.model.structure import Structure
from tests.families import stock_model, tiny_config_of

UNIT = InputChange("define", 4, 12, 2, 2)
CHANGES = (
    EmbeddingChange(),
    EmbeddingChange(UNIT),
    EmbeddingChange(UNIT, OutputChange()),
    EmbeddingChange(UNIT, OutputChange(4, tied=True)),
    EmbeddingChange(replace(UNIT, cached=True, zero_padding=True), OutputChange(4)),
    EmbeddingChange(output=OutputChange(8)),
)


CLASSES = [
    (name, model_class)
    for name, family in FAMILIES.items()
    for model_class in (family.embedding.classes if family.embedding else ())
]


@pytest.mark.parametrize(("model_type", "model_class"), CLASSES)
class TestStockClasses:
    def test_have_these_modules(self, model_type, model_class):
        family = FAMILIES[model_type]
        config = tiny_config_of(model_type, architectures=[model_class])
        tables = resolve(family, config, Structure()).tables
        assert tables is not None
        model = stock_model(config)
        assert model.get_input_embeddings().weight is model.get_parameter(f"{tables.input}.weight")
        for alias in tables.aliases:
            assert model.get_parameter(f"{alias}.weight") is model.get_parameter(f"{tables.input}.weight")
        assert model.get_output_embeddings() is model.get_submodule(tables.output)
        shape = (tables.vocabulary, tables.model_dim)
        assert tuple(model.get_submodule(tables.output).weight.shape) == shape
        assert tables.tensors == {}

    def test_may_be_apart(self, model_type, model_class):
        """`tie_word_embeddings` false parts the output's table alone, where the family says so."""
        embedding = FAMILIES[model_type].embedding
        assert embedding is not None
        model = stock_model(
            tiny_config_of(model_type, architectures=[model_class], tie_word_embeddings=False)
        )
        input_table = model.get_parameter(f"{embedding.input}.weight")
        if embedding.apart:
            assert model.get_submodule(embedding.output).weight is not input_table


@pytest.mark.parametrize("change", CHANGES)
def test_is_written_and_read(change):
    structure = Structure(embedding=change)
    assert Structure.from_json(structure.to_json()).embedding == change
    assert structure.is_stock == (change == EmbeddingChange())


@pytest.mark.parametrize("change", CHANGES)
def test_ties_leave_the_declared_ones_alone(change):
    config, structure = tiny_config_of("bart"), Structure(embedding=change)
    for _ in range(2):
        found = resolve(FAMILIES["bart"], config, structure).ties
    assert Sizes(FAMILIES["bart"], config).ties() == {
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
        resolve(FAMILIES["bart"], tiny_config_of("bart"), Structure(embedding=EmbeddingChange(change))).tables


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
