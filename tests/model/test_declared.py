import pytest

from prunecli.architectures import Architecture
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
        "activation": "relu",
        "bias": False,
        "tie_word_embeddings": True,
    },
)


def test_counts():
    configs = ({}, {"hidden_size": 32}, {"hidden_size": 0})
    assert [Sizes(FAMILY, config).count("hidden_size") for config in configs] == [64, 32, 0]


@pytest.mark.parametrize(
    ("config", "axis", "message"),
    [
        ({"hidden_size": None}, "hidden_size", '"hidden_size" is None, not a count'),
        ({"heads": "4"}, "heads", "\"heads\" is '4', not a count"),
        ({"heads": True}, "heads", '"heads" is True, not a count'),
        ({"heads": -2}, "heads", '"heads" is -2, not a count'),
        ({}, "depth", 'lacks "depth", which a model of type toy needs'),
        ({}, "activation", "\"activation\" is 'relu', not a count"),
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
        ({"bias": True}, "bias", True),
        ({"activation": "gated-gelu"}, "activation:gated-", True),
        ({}, "activation:gated-", False),
    ],
)
def test_conditions(config, condition, expected):
    assert Sizes(FAMILY, config).holds(condition) is expected
