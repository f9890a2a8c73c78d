from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.methods.sharing.options import FfnOptions
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.opening import shim_classes
from prunecli.model.rewrite import Rewrite
from prunecli.selection.cut import Selection, cut
from prunecli.tensors import stream
from tests.contracts.method_contract import (
    CachedGeneration,
    InSteps,
    Method,
    MethodContract,
    WrittenFiles,
    assert_near,
    batch_for,
    logits,
    logits_of,
    made_of,
    written,
)
from tests.families.family import FfnLayout
from tests.families.records import CASES, own_branches, own_layouts
from tests.ffn_layouts import LAYOUTS, ffns_of, tiny, weights
from tests.opening import load
from tests.reference import ffn as reference
from tests.reference.masks import passed_by
from tests.tiny import config_of


@dataclass(frozen=True)
class Sharing:
    """Options, and what they make of FFNs, restated.

    Attributes:
        options: of the method.
        merged: what stands in the place of the FFNs of a group.
    """

    options: FfnOptions
    merged: Callable[[list[reference.Ffn]], reference.Ffn]


def narrowed_to(width: int) -> Callable[[list[reference.Ffn]], reference.Ffn]:
    """All side by side, of which those units stay that matter most."""
    return lambda ffns: reference.narrowed(reference.scaled(reference.concat(ffns), 1 / len(ffns)), width)


def of_two_stacks(width: int) -> Sharing:
    options = FfnOptions(
        preset="SharedEncNoDec", init="concat", keep_units="norms", width=width, dense_only=True
    )
    return Sharing(options, narrowed_to(width))


SHARING = {
    "nllb-moe": of_two_stacks(40),  # its dense FFNs; the experts stay
    "marian": Sharing(
        FfnOptions(preset="SharedEncSharedDec", init="mean", keep_units="norms", width=40),
        lambda ffns: reference.narrowed(reference.mean(ffns), 40),
    ),
    "bart": Sharing(FfnOptions(preset="SharedEncDec", init="concat", scale=1.0), reference.concat),
    "bert": Sharing(
        FfnOptions(preset="SharedEnc", init="concat", keep_units="norms", width=70), narrowed_to(70)
    ),
    "gpt2": Sharing(
        FfnOptions(preset="SharedDec", init="concat", keep_units="norms", width=70), narrowed_to(70)
    ),
}
"""Of these families; the others' are several side by side, narrowed, and none in a decoder beside an encoder."""


def sharing_of(case: str) -> Sharing:
    if case in SHARING:
        return SHARING[case]
    if CASES[case].task == "translation":
        return of_two_stacks(70)
    return Sharing(FfnOptions(preset="Shared", init="concat", keep_units="norms", width=70), narrowed_to(70))


class FfnSharing(Method):
    """Sharing as `sharing_of` the case says."""

    keep_everything = FfnOptions(encoder="keep")
    impossible = FfnOptions(preset="OneWide", groups=(5,), dense_only=True)

    def make_source(self) -> Path:
        return tiny(self.path, self.case)

    def reduce(self, source: Checkpoint) -> Rewrite:
        made = made_of(source, sharing_of(self.case).options)
        assert "auto_map" in made.config  # not a stock model
        return made

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        """Weights of the merged FFN, by the reference, in each layer that shares it; dropped ones passed by."""
        layout, ffns = LAYOUTS[self.case], ffns_of(weights(self.path), self.case)
        structure = rewrite.structure
        gone, groups = sorted(structure.removed), {name: {name} for name in structure.widths}
        for name, owner in structure.shared.items():
            groups.setdefault(owner, {owner}).add(name)
        for members in groups.values():
            own = [name for name in layout.names if name in members]
            merged = sharing_of(self.case).merged([ffns[name] for name in own])
            for name in own:
                put(model, name, reference.write(merged, layout.tensors))
        self.hooks.enter_context(without_ffn(model, layout, gone))


def put(model: Any, name: str, made: dict[str, np.ndarray]) -> None:
    """These tensors in the place of an FFN's, of whatever width they are."""
    for suffix, value in made.items():
        layer, _, kind = suffix.rpartition(".")
        module = model.get_submodule(f"{name}.{layer}")
        setattr(module, kind, torch.nn.Parameter(torch.tensor(value, dtype=torch.float32)))
        if hasattr(module, "nf"):  # GPT-2's Conv1D reshapes by it
            module.nf = module.weight.shape[1]


def without_ffn(model: Any, layout: FfnLayout, names: Sequence[str]) -> AbstractContextManager[None]:
    """Within the block the stock model passes these FFNs by: h + FFN(LN(h)) and LN(h + FFN(h)) become h."""
    norms = [layout.names[name] for name in names if layout.post_norm]
    return passed_by(model, norms, [f"{name}.{layout.output}" for name in names])


class TestEveryFamily(FfnSharing, MethodContract):
    cases = own_branches(LAYOUTS)

    @pytest.fixture(autouse=True)
    def _in_small_blocks(self, monkeypatch):
        monkeypatch.setattr(stream, "BLOCK_ELEMENTS", 100)


def of_task(*tasks: str) -> list[str]:
    return [case for case in LAYOUTS if CASES[case].task in tasks]


class TestEveryDecoder(FfnSharing, CachedGeneration):
    pass


STEPS = {
    "one side, then the other": ({"encoder": "share"}, {"decoder": "drop"}, {"preset": "SharedEncNoDec"}),
    "a side that shares already": (
        {"preset": "SharedEncNoDec"},
        *[{"encoder": "drop", "decoder": "drop"}] * 2,
    ),
}
"""First, second, and both at once."""


@pytest.mark.parametrize("chosen", STEPS.values(), ids=STEPS)
class TestTwoStacks(FfnSharing, InSteps):
    cases = own_layouts(of_task("translation"))

    @pytest.fixture(autouse=True)
    def _chosen(self, chosen):
        self.chosen = chosen

    def steps(self) -> Any:
        return (FfnOptions(**own, dense_only=True) for own in self.chosen)


class TestOneStack(FfnSharing):
    cases = own_layouts(of_task("mlm", "lm"))

    def test_dropping_all(self, source):
        out = written(source, FfnOptions(preset="No"), "out")
        original = self.original(source)
        with without_ffn(original, LAYOUTS[self.case], [*LAYOUTS[self.case].names]):
            assert_near(logits(out), logits_of(original))


class TestFiles(FfnSharing, WrittenFiles):
    pass


class TestEveryLayout(FfnSharing):
    def test_widening_keeps_what_is_computed(self, source):
        """And gives the new units a gradient."""
        side = "decoder" if CASES[self.case].task == "lm" else "encoder"
        groups = 2 if self.case == "nllb-moe" else 3
        options = FfnOptions(**{side: "share"}, groups=(groups,), width=140, init="first", dense_only=True)
        out = written(source, options, "out")
        assert_near(logits(out), logits_of(self.original(source)))
        name = next(iter(LAYOUTS[self.case].names))
        made = ffns_of(weights(out), self.case)[name]
        assert made.inputs[:, 130:].std() == pytest.approx(0.02, rel=0.2)
        assert not made.biases[:, 130:].any()
        model = load(out)
        model(**batch_for(model.config)).logits.square().sum().backward()
        gradient = model.get_submodule(f"{name}.{LAYOUTS[self.case].output}").weight.grad
        axis = LAYOUTS[self.case].tensors[f"{LAYOUTS[self.case].output}.weight"]
        new = gradient.movedim(axis, 0)[130:]
        assert new.abs().amax(1).gt(0).float().mean() > 0.5


class TestLastToBFloat16(FfnSharing, WrittenFiles, MethodContract):
    cases = ("llama",)
    cast = "BF16"
    reduce = FfnOptions(preset="Shared", init="last", dtype="bfloat16")

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        layers = model.model.layers
        for layer in layers[:-1]:
            layer.mlp.load_state_dict(layers[-1].mlp.state_dict())


def narrowed(source: Checkpoint, widths: Mapping[str, int]) -> Rewrite:
    """The first hidden units of each FFN stay."""
    axes = axes_of(source, "unit")
    return cut(
        source,
        Selection({axis.name: axis.ids[: widths[axis.module]] for axis in axes if axis.module in widths}),
    )


def test_one_key_for_both_sides_needs_one_width():
    source = open_model(tiny("source", "t5"))
    made = narrowed(source, {name: 20 for name in LAYOUTS["t5"].names if name.startswith("encoder.")})
    assert shim_classes(made.config)
    assert made.config["d_ff"] == 48


def test_uneven_widths_can_become_stock_again():
    source, names = tiny("source", "gpt2"), list(LAYOUTS["gpt2"].names)
    written(source, lambda opened: narrowed(opened, {names[1]: 20}), "one")
    written("one", lambda opened: narrowed(opened, dict.fromkeys(names, 20)), "out")
    config = config_of("out")
    assert (config["model_type"], config["n_inner"]) == ("gpt2", 20)
    assert "auto_map" not in config
