"""Comparisons of whole models: what is the same for one as for two, for one pair as for several."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.analysis.model_similarity import (
    Comparison,
    compare,
    portions_of,
    random_label,
    similarity_of,
)
from prunecli.errors import DataError
from prunecli.evaluation.options import SimilarityOptions
from prunecli.model.checkpoint import open_model
from prunecli.modules.drawing import random_model
from prunecli.results.similarity import Similarity
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText
from tests.families import tiny_family
from tests.ffn_layouts import tiny, weights, write_changed, write_copy

WORDS = ("the", "hen", "hat", "no", "tin", "inn", "in", "on", "ten", "a")
LINES = tuple(f"{WORDS[n % 10]} {WORDS[n * 7 % 9]} {WORDS[n // 3 % 10]}" for n in range(24))
TEXT = ParallelText(
    "val", {"eng_Latn": LINES, "fra_Latn": tuple(line[::-1] for line in LINES), "deu_Latn": LINES[::-1]}
)
OPTIONS = SimilarityOptions(neighbours=0.2, batch_tokens=64, device="cpu", dtype="float32")
PAIRS = (("eng_Latn", "fra_Latn"), ("fra_Latn", "deu_Latn"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two seeds of one shape; a wider one of a third, with fewer layers; one that lost two FFNs."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two", "three")):
        tiny(folder / name, "m2m_100", seed=seed)
    tiny_family(folder / "wide", "m2m_100", d_model=64, encoder_layers=2)
    ffns = ("model.decoder.layers.0", "model.decoder.layers.1")
    write_changed(folder / "one", folder / "less", "m2m_100", {name: {"removed": True} for name in ffns})
    return folder


def compared(
    models: Path, *names: str, pairs: tuple[tuple[str, str], ...] = PAIRS[:1]
) -> dict[str, Comparison]:
    opened = {name: open_model(models / name) for name in names}
    return compare(opened, portions_of(TEXT, pairs), OPTIONS)


def result(
    comparison: Comparison, benchmarks: Sequence[Comparison] = (), randoms: Sequence[Comparison] = ()
) -> Similarity:
    about = {"format": Similarity.FORMAT, "checkpoints": ["first", "second"]}
    return similarity_of(comparison, benchmarks, randoms, **about)


def rows_of(comparison: Comparison, found: Similarity, side: str) -> list[dict[str, Any]]:
    """Rows of one side's components."""
    names = {component.name for component in comparison.components[0] if component.side == side}
    return [row for row in found.corresponding or [] if row["first"] in names]


def test_a_copy_is_the_same(models):
    opened = {name: open_model(models / "one") for name in ("one", "copy")}
    found = compare(opened, portions_of(TEXT, PAIRS[:1]), OPTIONS)["copy"]
    for measure in ("cka", "lns"):
        np.testing.assert_allclose(np.diagonal(found.part("between", measure)), 1, rtol=1e-12)
        np.testing.assert_array_equal(found.part("first", measure), found.part("second", measure))


def test_removed_ffns_are_left_out_and_named(models):
    found = compared(models, "one", "less")["less"]
    gone = ("model.decoder.layers.0.ffn", "model.decoder.layers.1.ffn")
    assert found.removed == ((), gone)
    made = result(found)
    assert not {row["second"] for row in made.corresponding or []} & set(gone)
    assert made.left_out["second"] == {"removed": list(gone), "constant": []}
    assert [row["lns"] for row in rows_of(found, made, "encoder")] == [1.0] * 6


def test_normalised_by_benchmarks(models):
    found = compared(models, "one", "less", "two", "three")
    made = result(found["less"], [found["two"], found["three"]])
    places = {component.name: place for place, component in enumerate(found["less"].components[0])}
    for row in made.corresponding or []:
        place = places[row["first"]]
        both = [found[name].part("between", "cka")[place, place] for name in ("two", "three")]
        assert row["cka_benchmark"] == pytest.approx(sum(both) / 2, abs=1e-6)
        assert row["cka_normalised"] == pytest.approx(200 * row["cka"] / sum(both), abs=1e-2)
    decoder = rows_of(found["less"], made, "decoder")
    assert len(decoder) == 4  # its two FFNs are in neither mean
    mean = made.mean["decoder"]
    values = [row["cka"] for row in decoder]
    assert mean["cka"] == pytest.approx(sum(values) / 4, abs=1e-6)
    whole = sum(row["cka_benchmark"] for row in decoder)
    assert mean["cka_normalised"] == pytest.approx(100 * sum(values) / whole, abs=1e-2)


def test_random_weights_are_the_lower_bound(models):
    """The mean over seeds of what a checkpoint of the same random weights gives."""
    with open_model(models / "one") as first:
        random = [random_model(first, seed) for seed in (0, 1)]
    for seed, model in enumerate(random):
        shutil.copytree(models / "one", models / f"random-{seed}")
        model.save_pretrained(models / f"random-{seed}")
    stored = compared(models, "one", "less", "random-0", "random-1")
    opened = {name: open_model(models / name) for name in ("one", "less")}
    drawn = compare(opened, portions_of(TEXT, PAIRS[:1]), OPTIONS.model_copy(update={"random_baseline": 2}))
    assert list(drawn) == ["less", random_label(0), random_label(1)]
    for seed in (0, 1):
        for measure in ("cka", "lns"):
            expected = stored[f"random-{seed}"].part("between", measure)
            np.testing.assert_allclose(
                drawn[random_label(seed)].part("between", measure), expected, rtol=1e-9
            )
    made = result(drawn["less"], (), [drawn[random_label(0)], drawn[random_label(1)]])
    decoder = [row["cka_random"] for row in rows_of(drawn["less"], made, "decoder")]
    assert made.mean["decoder"]["cka_random"] == pytest.approx(sum(decoder) / 4, abs=1e-6)


def test_successive_components_of_one_model(models):
    found = result(compared(models, "one")["one"])
    known = {component.name: component for component in found.components["first"]}
    pairs = [(known[row["first"]], known[row["second"]]) for row in found.successive or []]
    assert [(first.label, second.label) for first, second in pairs[:5]] == [
        ("0.sa", "0.ffn"),
        ("0.ffn", "1.sa"),
        ("1.sa", "1.ffn"),
        ("1.ffn", "2.sa"),
        ("2.sa", "2.ffn"),
    ]
    assert len(pairs) == 5 + 5
    assert pairs[5][0].side == pairs[5][1].side == "decoder"


def test_constant_components_have_no_value(models):
    tensors = weights(models / "one")
    tensors["model.encoder.layers.1.fc2.weight"] *= 0  # the bias alone, for every token
    write_copy(models / "one", models / "bias", tensors)
    found = compared(models, "one", "bias")["bias"]
    made = result(found)
    assert [made.left_out[name]["constant"] for name in ("first", "second")] == [
        [],
        ["model.encoder.layers.1.ffn"],
    ]
    assert [row["second"] for row in made.corresponding or [] if row["lns"] is None] == [
        "model.encoder.layers.1.ffn"
    ]
    known = [row["cka"] for row in rows_of(found, made, "encoder") if row["cka"] is not None]
    assert len(known) == 5
    assert made.mean["encoder"]["cka"] == pytest.approx(sum(known) / 5, abs=1e-6)
    assert None in made.matrices["cka"]["between"][0]


def test_one_stack_reads_plain_text(tmp_path):
    opened = {
        name: open_model(tiny_family(tmp_path / name, model_type))
        for name, model_type in (("bert", "bert"), ("gpt2", "gpt2"))
    }
    portions = portions_of(PlainText((Path("text.txt"),), LINES))
    found = compare(opened, portions, OPTIONS)["gpt2"]
    assert found.part("between", "lns").shape == (6, 6)
    assert result(found).corresponding == []  # an encoder and a decoder
    assert result(found).mean == {}


def test_too_few_sentences_are_refused():
    with pytest.raises(DataError, match="19 sentences are too few"):
        portions_of(PlainText((Path("text.txt"),), LINES[:19]))
