from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prunecli import pipeline
from prunecli.errors import CheckpointError, MemoryShortError
from prunecli.evaluation.on_text import RunOptions
from prunecli.methods import measuring
from prunecli.methods.plans import LayerOptions, NarrowOptions, plan_layers, plan_widths
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.units import TextRun
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.opening import result_config
from prunecli.model.rewrite import Rewrite
from prunecli.model.structure import Structure
from prunecli.modules.fitting import Need
from prunecli.modules.loading import sparse_ffns
from prunecli.pipeline import Summary, apply, plan_ffn_on_text
from prunecli.tensors.stream import Copy, Output
from prunecli.text.choice import TextChoice
from tests.commands.calls import names
from tests.families import tiny_family
from tests.opening import load
from tests.structures import axes_of
from tests.tiny import config_of, random_tensors, tiny_nllb_moe, write_json, write_weights

KEPT = {f"model.{side}.layers.1.ffn": (0, 1) for side in ("encoder", "decoder")}


def tiny() -> Path:
    return tiny_nllb_moe("in", experts=4, layers=2)


def keeping(source: Checkpoint) -> Rewrite:
    """The first two experts of each layer stay: a method that renumbers nothing."""
    outputs = []
    for name, info in source.tensors.items():
        if ".router." in name:
            outputs.append(Output(name, "F32", (2, *info.shape[1:]), Copy(name, ((0, ((0, 2),)),))))
        elif "expert_2" not in name and "expert_3" not in name:
            outputs.append(Output(name, "F32", info.shape, Copy(name)))
    structure = replace(source.structure, axes=axes_of("expert", KEPT, 4))
    return Rewrite(structure, tuple(outputs), result_config(source, structure))


def pruned(directory: Path) -> Summary:
    source = open_model(directory)
    return apply(source, keeping(source), "out")


def test_a_source_that_does_not_fit_its_config_is_refused_first():
    source = tiny()
    tensors = random_tensors(config_of(source))
    tensors["model.stray.weight"] = tensors["model.encoder.layer_norm.weight"]
    write_weights(source, tensors)
    with pytest.raises(CheckpointError, match=r"1 unexpected \(model\.stray\.weight\)"):
        pruned(source)
    assert names() == ["in"]


def test_outputs_that_do_not_fit_their_structure_are_refused_first():
    source = open_model(tiny())
    good = keeping(source)
    for wrong in ({"outputs": good.outputs[1:]}, {"structure": Structure()}):
        with pytest.raises(CheckpointError, match="would not be what its config says"):
            apply(source, replace(good, **wrong), "out")
    assert names() == ["in"]


def test_what_lies_on_the_disk_is_compared_with_what_was_to_be_written(monkeypatch):
    monkeypatch.setattr(
        pipeline, "write_json", lambda path, payload, **_: write_json(path, {**payload, "vocab_size": 1})
    )
    with pytest.raises(CheckpointError, match=r"config\.json was not written as it was to be"):
        pruned(tiny())
    assert names() == ["in"]


@pytest.mark.parametrize("step", [0, 3])  # of no layer, or of more layers than there are
def test_a_mixture_of_experts_without_sparse_layers(step):
    steps = dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), step)
    steps |= dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    tiny_nllb_moe("m", layers=2, sparse_step=3, config=steps)
    source = open_model("m")
    outputs = tuple(Output(name, "F32", info.shape, Copy(name)) for name, info in source.tensors.items())
    apply(source, Rewrite(Structure(), outputs, result_config(source, Structure())), "out")
    model = load("out")
    assert model.config.num_experts == 8
    assert not sparse_ffns(model)


# Plans that look at text: the same as from what is measured by hand, and nothing is left behind.


ON_CPU = RunOptions(device="cpu")


@pytest.fixture
def model():
    return open_model(tiny_family("model", "gpt2"))


@pytest.fixture
def text():
    Path("text").write_text("ab cd\nefg\n")
    return TextRun(TextChoice(files=("text",)), ON_CPU)


def test_the_units_that_stay_are_the_most_active(model, text):
    options = NarrowOptions(width=5, metric="activation")
    measured = measuring.measure_activations(model, text.choice.read("lm"), text)
    ranked = {name: np.argsort(-np.array(values)) for name, values in measured.values.items()}
    by_hand = {name: tuple(sorted(units[:5])) for name, units in ranked.items()}
    assert plan_widths(model, options, text).kept == by_hand
    assert plan_widths(model, options.updated(scores=measured)).kept == by_hand


def test_merged_ffns_leave_nothing_behind_and_a_shortage_names_the_source(model, text, monkeypatch):
    ran = []

    def too_large(checkpoint, *_):
        ran.append(checkpoint.path)
        raise MemoryShortError("too large", "smaller", Need(checkpoint, None, None, {}, []))

    monkeypatch.setattr(measuring, "measure_activations", too_large)
    with pytest.raises(MemoryShortError) as caught:
        plan_ffn_on_text(model, FfnOptions(width=20, keep_units="activations"), text)
    assert caught.value.need.checkpoint.path == model.path != ran[0]
    assert not ran[0].exists()


def test_layers_of_an_encoder_without_a_head_are_ranked_by_its_vectors():
    Path("text").write_text("the hen\nten tins on\n")
    model = open_model(tiny_family("model", "bert", architectures=["BertModel"]))
    text = TextRun(TextChoice(files="text"), ON_CPU)
    plan = plan_layers(model, LayerOptions(count=1), text)
    assert plan.step["arguments"]["metric"] == "embedding"
    assert plan.kept == plan_layers(model, LayerOptions(count=1, metric="embedding"), text).kept
