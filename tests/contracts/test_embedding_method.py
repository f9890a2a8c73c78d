"""Factorised embeddings: what they compute, how they are stored, opened, saved and cached."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.errors import CheckpointError, UsageError
from prunecli.methods.embeddings.options import EmbeddingOptions
from prunecli.methods.embeddings.plan import EmbeddingPlan, Factors, rewrite_embeddings
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.embedding import describe_embeddings
from prunecli.model.opening import shim_classes
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import apply
from prunecli.selection.cut import Selection
from tests.contracts.method_contract import (
    Method,
    MethodContract,
    WrittenFiles,
    logits,
    logits_of,
    made_of,
    stock_model,
    written,
)
from tests.factorised import CASES, cached, factorised, has_stock_cache, options, replaced
from tests.families import tiny_family
from tests.families.records import own_branches
from tests.ffn_layouts import weights, write_copy
from tests.opening import load
from tests.tiny import config_of

COMPUTED = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
"""Pegasus saves them, though it computes them where they are left out."""


TABLES = ("nllb-moe", "t5", "bert", "gpt2", "llama")
"""Cases whose tables of tokens are tied, stored or followed by a bias in different ways."""
WITH_UNIT = [*((case, "both") for case in TABLES), ("bart", "input"), ("llama", "input")]
"""Cases and sides of which the input's has a unit; alone where the output is tied, and where it is not."""
SIDES_OF = [*WITH_UNIT, ("bart", "output"), ("llama", "output")]


@pytest.fixture
def source(case):
    return tiny_family("source", case)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Factorised cases that are only read; each is made once for the same options."""

    @cache
    def of(case: str, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp(case)
        return factorised(tiny_family(folder / "source", case), folder / "out", **options)

    return of


class Factorising(Method):
    """Both sides; the tensors of the two come to lie beside each other."""

    keeps_order = False
    reduce = options(side="both")
    impossible = options(map_dim=10_000)

    def keep_everything(self, source: Checkpoint) -> Rewrite:
        """The tables as they are, factorised or not."""
        tables = source.layout.require_tables()
        plan = EmbeddingPlan(tables, tables.change, EmbeddingOptions())
        return rewrite_embeddings(source, plan, Factors())

    def mask(self, model: Any, rewrite: Rewrite) -> None:
        apply(open_model(self.path), rewrite, self.folder)
        replaced(model, CASES[self.case], self.folder)


class TestEveryFamily(Factorising, MethodContract):
    cases = own_branches(CASES)


class TestFiles(Factorising, WrittenFiles):
    pass


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("side", ["input", "output"])
def test_computes_with_the_rows_that_it_stands_for(case, source, made, side):
    out = made(case, side=side)
    assert not torch.allclose(logits(out), logits(source), atol=1e-3)
    torch.testing.assert_close(
        logits(out), logits_of(replaced(load(source), CASES[case], out)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("case", "side"), SIDES_OF)
def test_saves_what_it_was_made_of(case, made, side):
    out = made(case, side=side)
    model = load(out)
    expected = logits_of(model)
    model.tie_weights()
    assert torch.equal(logits_of(model), expected)
    model.save_pretrained("saved")
    one, two = weights(out), weights("saved")
    assert one.keys() <= two.keys()
    assert two.keys() - one.keys() <= COMPUTED
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert torch.equal(logits("saved"), expected)


@pytest.mark.parametrize("case", ["bart"])
@pytest.mark.parametrize(
    "options",
    [
        {"shared_blocks": True},
        {"reduction": False, "expand_dim": None},
        {"map_dim": 32, "expand_dim": 40},  # as wide as the model
        {"kind": "group-linear", "shared_blocks": True, "reduction": False, "expand_dim": None},
        {"kind": "hgt-residual", "reduction": False, "expand_dim": None},
    ],
    ids=str,
)
def test_variants_compute_with_the_rows_that_they_stand_for(case, source, options):
    """Rows of the ablations (Tables 2, 6 and 8), and A.1's one block for all groups."""
    out = factorised(source, "out", side="both", **options)
    expected = logits_of(replaced(load(source), CASES[case], out))
    torch.testing.assert_close(logits(out), expected, rtol=1e-3, atol=1e-4)
    open_model(out).check()


@pytest.mark.parametrize(("case", "side"), WITH_UNIT)
def test_caching_changes_no_logits(case, made, source, side):
    out = made(case, side=side)
    later = cached(out, "later")
    torch.testing.assert_close(logits(later), logits(out), rtol=1e-4, atol=1e-5)
    at_once = factorised(source, "at-once", side=side, cache=True)
    one, two = weights(later), weights(at_once)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, two[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", TABLES)
def test_caching_the_input_alone_gives_a_stock_model(case, source):
    out = factorised(source, "out", side="input", cache=True)
    found = config_of(out)
    assert found["prunecli"]["embedding"]["input"]["cached"]
    if not has_stock_cache(CASES[case]):  # its config cannot say that the output has a table of its own
        assert shim_classes(found)
        return
    assert found["model_type"] == config_of(source)["model_type"]
    torch.testing.assert_close(logits_of(stock_model(out, source)), logits(out))


def test_a_row_of_zeros_stays_one():
    source = tiny_family("plain", "m2m_100")
    held = weights(source)
    held["model.shared.weight"][1] = 0
    out = factorised(write_copy(source, "source", held), "out")
    assert config_of(out)["prunecli"]["embedding"]["input"]["zero_padding"]
    unit = load(out).get_input_embeddings()
    assert not unit(torch.tensor([1])).any()
    assert unit(torch.tensor([0, 2])).any()
    assert not weights(cached(out, "cached"))["model.shared.weight"][1].any()


@pytest.mark.parametrize(("case", "side"), SIDES_OF)
def test_tokens_are_cut_from_the_map_table(case, made, side):
    kept = [*range(5), *range(8, 40)]
    fewer = Selection({"tokens": kept}, files={"tokenizer.json": None})

    out = made(case, side=side)
    whole, part = load(out), load(written(out, fewer, "less"))
    ids = torch.tensor([[0, 5, 6, 20, 2]])
    old = torch.tensor(kept)[ids]
    targets = {"decoder_input_ids": old} if whole.config.is_encoder_decoder else {}
    expected = logits_of(whole, {"input_ids": old, **targets})[..., kept]
    found = logits_of(part, {"input_ids": ids, **dict.fromkeys(targets, ids)})
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "described"),
    [
        (
            {},
            "input: a unit of kind define (4 to 12 to 32, 2 layers, up to 2 groups); "
            "output: 32 to 4, then the input's map table",
        ),
        (
            {"side": "input", "kind": "projective"},
            "input: a unit of kind projective (4 to 32); output: a table of its own",
        ),
        (
            {"cache": True, "kind": "projective"},
            "input: a table of the rows of a unit of kind projective (4 to 32); "
            "output: 32 to 4, then a map table of its own",
        ),
    ],
)
def test_says_what_was_done(options, described):
    out = factorised(tiny_family("source", "bart"), "out", **options)
    assert describe_embeddings(open_model(out).layout.require_tables()) == described
    assert described[1:] in (out / "README.md").read_text()


# What `factorize-embeddings` refuses, and what a damaged or missing part of its result leads to.

SIDES = ("input", "output", "both")


@pytest.mark.parametrize("side", SIDES)
def test_a_factorised_table(side):
    out = factorised(tiny_family("source", "nllb-moe"), "out", side=side)
    with pytest.raises(UsageError, match="is factorised already"):
        made_of(open_model(out), options(side=side))


@pytest.mark.parametrize("side", ["output", "both"])
@pytest.mark.parametrize(
    ("model_type", "name"),
    [("bert", "BertForSequenceClassification"), ("llama", "LlamaForSequenceClassification")],
)
def test_a_side_that_the_class_lacks(model_type, name, side):
    source = tiny_family("source", model_type, architectures=[name])
    with pytest.raises(UsageError, match=f"{name} has no output layer"):
        made_of(open_model(source), options(side=side))
    out = factorised(source, "out")  # the default is the input's side then
    assert set(config_of(out)["prunecli"]["embedding"]) == {"input"}
    torch.testing.assert_close(logits(cached(out, "cached")), logits(out), rtol=1e-4, atol=1e-5)


def test_the_output_layer_has_no_rows_to_cache(models):
    with pytest.raises(UsageError, match="`cache` does not go with `side=output`"):
        made_of(open_model(models["bart"]), options(side="output", cache=True))


def test_a_value_that_is_not_finite():
    source = tiny_family("source", "gpt2")
    held = weights(source)
    held["transformer.wte.weight"][7, 3] = np.nan
    write_copy(source, "odd", held)
    with pytest.raises(CheckpointError, match="row 7 holds a value that is not finite"):
        factorised("odd", "out")
    assert not Path("out").exists()
