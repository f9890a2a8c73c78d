import pytest

from prunecli.architectures import FAMILIES, Architecture
from prunecli.errors import CheckpointError
from prunecli.model.declared import Sizes

FAMILY = Architecture(
    model_type="toy",
    model_class="Toy",
    auto_class="AutoModel",
    stacks=(),
    tensors=(),
    tied={"lm_head.weight": "shared.weight", "encoder.embed.weight": "shared.weight"},
    loose=("lm_head.weight",),
    attributes={
        "hidden_size": 64,
        "heads": 4,
        "head_dim": "hidden_size/heads",
        "inner": "4*hidden_size",
        "activation": "relu",
        "bias": False,
        "tie_word_embeddings": True,
    },
)


@pytest.mark.parametrize(
    ("config", "axis", "expected"),
    [
        ({}, "hidden_size", 64),
        ({"hidden_size": 32}, "hidden_size", 32),
        ({}, "3", 3),
        ({}, "3*hidden_size", 192),
        ({}, "hidden_size/heads", 16),
        ({}, "head_dim", 16),
        ({"heads": 8}, "heads*head_dim", 64),
        ({"head_dim": 24}, "heads*head_dim", 96),
        ({"head_dim": None, "inner": None}, "inner", 256),
        ({"hidden_size": 0}, "inner", 0),
    ],
)
def test_counts(config, axis, expected):
    assert Sizes(FAMILY, config).count(axis) == expected


@pytest.mark.parametrize(
    ("config", "axis", "message"),
    [
        ({"hidden_size": None}, "hidden_size", '"hidden_size" is None, not a count'),
        ({"heads": "4"}, "heads", "\"heads\" is '4', not a count"),
        ({"heads": True}, "heads", '"heads" is True, not a count'),
        ({"heads": -2}, "heads", '"heads" is -2, not a count'),
        ({"heads": 5}, "head_dim", "hidden_size/heads is 64 / 5, not a whole number"),
        ({"heads": 0}, "head_dim", "64 / 0, not a whole number"),
        ({}, "depth", 'lacks "depth", which a model of type toy needs'),
        ({}, "activation", 'lacks "relu"'),
    ],
)
def test_no_counts(config, axis, message):
    with pytest.raises(CheckpointError) as caught:
        Sizes(FAMILY, config).count(axis)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "condition", "expected"),
    [
        ({}, None, True),
        ({}, "bias", False),
        ({}, "!bias", True),
        ({"bias": True}, "bias", True),
        ({"activation": "gated-gelu"}, "activation:gated-", True),
        ({"activation": "gated-gelu"}, "!activation:gated-", False),
        ({}, "activation:gated-", False),
    ],
)
def test_conditions(config, condition, expected):
    assert Sizes(FAMILY, config).holds(condition) is expected


@pytest.mark.parametrize(
    ("model_type", "config", "says"),
    [
        ("t5", {"architectures": ["T5EncoderModel"]}, "class T5EncoderModel is not declared: T5Model, T5For"),
        ("bert", {"position_embedding_type": "relative_key"}, '_embedding_type": "relative_key" are not'),
        ("gpt2", {"add_cross_attention": True}, '"add_cross_attention": true are not declared'),
        ("bart", {"tie_word_embeddings": False}, '"tie_word_embeddings": false are not declared'),
        ("bert", {"architectures": ["BertModel"], "position_embedding_type": None}, None),
        ("t5", {"tie_word_embeddings": False, "architectures": ["PrunecliT5Model"]}, None),
        ("nllb-moe", {"architectures": ["NllbMoeForConditionalGeneration"]}, None),
    ],
)
def test_what_no_record_knows_is_named(model_type, config, says):
    found = Sizes(FAMILIES[model_type], config).undeclared()
    assert found is None if says is None else says in str(found)
