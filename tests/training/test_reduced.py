"""Reduced checkpoints are trained as they are: what was removed stays removed, what is shared stays one parameter."""

from dataclasses import replace

import pytest

from prunecli import load_model
from prunecli.commands.factorize_embeddings import factorize_embeddings
from prunecli.commands.share import share_ffn
from prunecli.model.checkpoint import open_model
from tests.commands.calls import raising
from tests.families import tiny_family
from tests.training.runs import options, train, translation, unchanged, written


def trained_and_written(source, folder, data, **changes):
    """Train `source`, write the result as the command does, and give its path."""
    trained = train(source, folder / "state", options(steps=2, learning_rate=1e-2, **changes), data)
    output = written(source, trained, folder / "out")
    with open_model(source) as before, open_model(output) as after:
        assert dict(before.tensors) == dict(after.tensors)
    return output


@pytest.mark.parametrize(
    ("family", "configuration"),
    [("m2m_100", "OneWide"), ("bart", "SharedEncSharedDec"), ("t5", "OneWide"), ("t5", "SharedEncSharedDec")],
)
def test_with_shared_and_removed_ffns(tmp_path, family, configuration):
    sizes = {} if family == "t5" else {"decoder_ffn_dim": 48}
    model = tiny_family(tmp_path / "model", family, **sizes)
    source = tmp_path / "reduced"
    raising(share_ffn, model, "--preset", configuration, "-o", source)
    made = trained_and_written(source, tmp_path, translation())
    assert unchanged(source, made) <= {"final_logits_bias"}
    before, after = load_model(source, device="cpu"), load_model(made, device="cpu")
    # A shared FFN is held once.
    assert [name for name, _ in before.named_parameters()] == [name for name, _ in after.named_parameters()]
    with open_model(source) as one, open_model(made) as other:
        assert replace(other.structure, history=()) == replace(one.structure, history=())


def test_with_factorised_embeddings(tmp_path):
    source = tmp_path / "reduced"
    sizes = ("--map-dim", 8, "--expand-dim", 16, "--depth", 1)
    raising(factorize_embeddings, tiny_family(tmp_path / "model", "m2m_100"), *sizes, "-o", source)
    assert not unchanged(source, trained_and_written(source, tmp_path, translation()))
