"""Width pruning keeps the contract of methods, in every declared family; one width everywhere is a stock model."""

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import UsageError
from prunecli.methods.plans import NarrowOptions, plan_widths
from prunecli.methods.sharing.options import FfnOptions
from prunecli.model.checkpoint import open_model
from prunecli.model.rewrite import Rewrite
from tests.contracts.method_contract import (
    InSteps,
    Method,
    MethodContract,
    WrittenFiles,
    assert_near,
    logits,
    logits_of,
    made_of,
    stock_model,
    written,
)
from tests.contracts.test_ffn_method import put
from tests.families.records import own_branches
from tests.ffn_layouts import LAYOUTS, ffns_of, tiny, weights
from tests.reference import ffn as reference
from tests.scores import scores_by_hand


def masked(ffn: reference.Ffn, kept: np.ndarray) -> reference.Ffn:
    """The units that are not kept add nothing."""
    return replace(ffn, outputs=ffn.outputs * kept[:, None])


def best(values: np.ndarray, count: int) -> np.ndarray:
    """Whether each is among the largest."""
    return values >= np.sort(values)[-count]


class WidthPruning(Method):
    """40 % of all hidden units, ranked together."""

    keep_everything = NarrowOptions(ratio=0.0, metric="norms", dense_only=True)
    reduce = NarrowOptions(ratio=0.4, metric="norms", uniform=False, dense_only=True)
    impossible = NarrowOptions(width=10_000, metric="norms", dense_only=True)

    def make_source(self) -> Path:
        return tiny(self.path, self.case)

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        ffns = ffns_of(weights(self.path), self.case)
        shares = {name: ffn.worth / np.linalg.norm(ffn.worth) for name, ffn in ffns.items()}
        ranked = np.sort(np.concatenate([*shares.values()]))
        kept = {name: own >= ranked[ceil(0.4 * len(ranked))] for name, own in shares.items()}
        for name, own in kept.items():
            put(model, name, reference.write(masked(ffns[name], own), LAYOUTS[self.case].tensors))
        widths = {name: own.sum() for name, own in kept.items()}
        assert len(set(widths.values())) > 1
        assert rewrite.structure.widths == widths


class TestEveryFamily(WidthPruning, MethodContract):
    cases = own_branches(LAYOUTS)


class TestFiles(WidthPruning, WrittenFiles):
    pass


class TestEveryLayout(WidthPruning, InSteps):
    def test_one_width_is_a_stock_model(self, case, source):
        options = NarrowOptions(ratio=0.3, metric="norms", multiple_of=4, dense_only=True)
        out = written(source, options, "out")
        original = self.original(source)
        for name, ffn in ffns_of(weights(source), case).items():
            width = len(ffn) * 7 // 10 // 4 * 4
            kept = masked(ffn, best(ffn.worth, width))
            put(original, name, reference.write(kept, LAYOUTS[case].tensors))
        expected = logits_of(original)
        assert_near(logits(out), expected)
        if case != "nllb-moe":  # never is
            assert_near(logits_of(stock_model(out, source)), expected)

    def steps(self) -> tuple[Any, Any, Any]:
        return tuple(NarrowOptions(width=width, metric="norms", dense_only=True) for width in (20, 12, 12))


def test_units_go_by_their_activations():
    source = tiny("source", "phi3")
    ffns, generator = ffns_of(weights(source), "phi3"), np.random.default_rng(0)
    active = {name: generator.random(len(ffn)) for name, ffn in ffns.items()}
    squares = {name: own**2 for name, own in active.items()}
    opened = open_model(source)
    fingerprint = opened.fingerprint
    measured = scores_by_hand(squares, "unit", "activation-norm", examples=1, fingerprint=fingerprint)
    plan = plan_widths(opened, NarrowOptions(width=10, metric="activation-norm", scores=measured))
    for name, ffn in ffns.items():
        norms = np.linalg.norm(ffn.outputs, axis=1)
        kept = np.flatnonzero(best(active[name] * norms, 10))
        assert plan.kept[f"{name}.units"] == tuple(kept)


def test_a_shared_ffn_counts_once():
    """And gets narrower in every layer that runs it."""
    source = tiny("source", "llama")
    shared = written(source, FfnOptions(decoder="share"), "shared")
    out = written(shared, NarrowOptions(ratio=0.5, metric="norms", uniform=False), "out")
    opened = open_model(out)
    opened.check()
    assert {layer.count for layer in opened.layout.ffns} == {24}
    assert {layer.owner for layer in opened.layout.ffns} == {"model.layers.0.mlp"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ratio": 0.5, "width": 3}, UsageError, "Give one of them"),
        ({"width": 3, "uniform": False}, UsageError, "`width` does not go with `uniform=False`"),
        ({}, UsageError, "`metric=activation-norm` needs text"),
        ({"side": "encoder"}, UsageError, "the model has no encoder"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        made_of(open_model(tiny("source", "llama")), NarrowOptions(**options))
