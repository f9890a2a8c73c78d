"""Plans that look at text: the same as from what is measured by hand, and nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest

from prunecli.errors import MemoryShortError, Shortage
from prunecli.evaluation.on_text import RunOptions
from prunecli.methods.ffn import activations
from prunecli.methods.ffn.narrow import NarrowOptions, plan_widths
from prunecli.methods.layers.plan import LayerOptions, plan_layers
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.units import TextRun
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import plan_ffn_on_text
from prunecli.text.choice import TextChoice
from tests.families import tiny_family

ON_CPU = RunOptions(device="cpu")


@pytest.fixture
def model(tmp_path):
    return open_model(tiny_family(tmp_path / "model", "gpt2"))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").write_text("ab cd\nefg\n")
    return TextRun(TextChoice(files=(tmp_path / "text",)), ON_CPU)


def test_the_units_that_stay_are_the_most_active(model, text):
    options = NarrowOptions(width=5, metric="activation")
    measured = activations.measure_activations(model, text.choice.read("lm"), text)
    by_hand = {
        name: tuple(sorted(np.argsort(-np.array(values))[:5])) for name, values in measured.values.items()
    }
    assert plan_widths(model, options, text).kept == by_hand
    assert plan_widths(model, options.updated(scores=measured)).kept == by_hand


def test_merged_ffns_leave_nothing_behind_and_a_shortage_names_the_source(model, text, tmp_path, monkeypatch):
    ran = []

    def too_large(checkpoint, *_):
        ran.append(checkpoint.path)
        raise MemoryShortError("too large", "smaller", Shortage(checkpoint.path, "cpu", "float32", 1, 1))

    monkeypatch.setattr(activations, "measure_activations", too_large)
    with pytest.raises(MemoryShortError) as caught:
        plan_ffn_on_text(model, FfnOptions(width=20, keep_units="activations"), text)
    assert caught.value.shortage.checkpoint == model.path != ran[0]
    assert not ran[0].exists()


def test_layers_of_an_encoder_without_a_head_are_ranked_by_its_vectors(tmp_path):
    (tmp_path / "text").write_text("the hen\nten tins on\n")
    model = open_model(tiny_family(tmp_path / "model", "bert", architectures=["BertModel"]))
    text = TextRun(TextChoice(files=tmp_path / "text"), ON_CPU)
    plan = plan_layers(model, LayerOptions(count=1), text)
    assert plan.step["arguments"]["metric"] == "embedding"
    named = plan_layers(model, LayerOptions(count=1, metric="embedding"), text)
    assert plan.kept == named.kept
