"""Comparisons of whole models: what is the same for one as for two, for one pair as for several."""

import errno
import os
import shutil
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from prunecli.analysis.model_similarity import (
    Component,
    Features,
    compare,
    components,
    portions_of,
    represent,
)
from prunecli.errors import DataError, OutputError, UnsupportedModelError
from prunecli.evaluation.options import SimilarityOptions
from prunecli.model.checkpoint import open_model
from prunecli.modules.drawing import random_model
from prunecli.results.similarity import Similarity
from prunecli.running.encoding import text_examples, translation_examples
from prunecli.running.runner import InMemory
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.families.records import CASES
from tests.ffn_layouts import LAYOUTS, OWN_SHAPES, tiny, weights, write_changed, write_copy
from tests.opening import load

WORDS = ("the", "hen", "hat", "no", "tin", "inn", "in", "on", "ten", "a")
LINES = tuple(f"{WORDS[n % 10]} {WORDS[n * 7 % 9]} {WORDS[n // 3 % 10]}" for n in range(24))
TEXT = ParallelText(
    "val", {"eng_Latn": LINES, "fra_Latn": tuple(line[::-1] for line in LINES), "deu_Latn": LINES[::-1]}
)
OPTIONS = SimilarityOptions(neighbours=0.2, batch_tokens=64, device="cpu", dtype="float32")
PAIRS = (("eng_Latn", "fra_Latn"),)


@pytest.fixture(scope="module")
def models(shared_path):
    """Two seeds of one shape; a wider one of a third, with fewer layers; one that lost two FFNs."""
    for seed, name in enumerate(("one", "two", "three")):
        tiny(shared_path / name, "m2m_100", seed=seed)
    tiny_family(shared_path / "wide", "m2m_100", d_model=64, encoder_layers=2)
    ffns = ("model.decoder.layers.0", "model.decoder.layers.1")
    write_changed(
        shared_path / "one", shared_path / "less", "m2m_100", {name: {"removed": True} for name in ffns}
    )
    return shared_path


def compared(models: Path, *names: str, **options: Any) -> Similarity:
    opened = {name: open_model(models / name) for name in names}
    return compare(opened, portions_of(TEXT, PAIRS), OPTIONS.updated(**options))[0]


def rows_of(found: Similarity, side: str) -> list[dict[str, Any]]:
    """Rows of one side's components."""
    return [row for row in found.corresponding or [] if f".{side}." in row["first"]]


def assert_bound(found: Similarity, models: Path, kind: str, *others: str) -> None:
    """Each row of `kind` is the mean of what comparisons of the first model with the others have."""
    places = {component.name: place for place, component in enumerate(found.components["first"])}
    matrices = [compared(models, "one", name).matrices for name in others]
    for row, measure in product(found.corresponding or [], ("cka", "lns")):
        place = places[row["first"]]
        values = [own[measure]["between"][place][place] for own in matrices]
        assert row[f"{measure}_{kind}"] == pytest.approx(np.mean(values), abs=2e-6)


def test_normalised_by_benchmarks(models):
    found = compared(models, "one", "less", "two", "three")
    assert_bound(found, models, "benchmark", "two", "three")
    for row in found.corresponding or []:
        assert row["cka_normalised"] == pytest.approx(100 * row["cka"] / row["cka_benchmark"], abs=1e-2)
    decoder = rows_of(found, "decoder")
    assert len(decoder) == 4  # its two FFNs are in neither mean
    mean = found.mean["decoder"]
    values = [row["cka"] for row in decoder]
    assert mean["cka"] == pytest.approx(sum(values) / 4, abs=1e-6)
    whole = sum(row["cka_benchmark"] for row in decoder)
    assert mean["cka_normalised"] == pytest.approx(100 * sum(values) / whole, abs=1e-2)


def test_random_weights_are_the_lower_bound(models):
    """The mean over seeds of what a checkpoint of the same random weights gives."""
    for seed in (0, 1):
        model = random_model(open_model(models / "one"), seed)
        shutil.copytree(models / "one", models / f"random-{seed}")
        model.save_pretrained(models / f"random-{seed}")
    found = compared(models, "one", "less", random_baseline=2)
    assert_bound(found, models, "random", "random-0", "random-1")
    decoder = [row["cka_random"] for row in rows_of(found, "decoder")]
    assert found.mean["decoder"]["cka_random"] == pytest.approx(sum(decoder) / 4, abs=1e-6)


def test_successive_components_of_one_model(models):
    found = compared(models, "one")
    known = {component.name: component for component in found.components["first"]}
    pairs = [(known[row["first"]], known[row["second"]]) for row in found.successive or []]
    encoder = [f"{layer}.{kind}" for layer in range(3) for kind in ("sa", "ffn")]
    decoder = [f"{layer}.{kind}" for layer in range(2) for kind in ("sa", "ca", "ffn")]
    assert [(first.label, second.label) for first, second in pairs] == [
        *pairwise(encoder),
        *pairwise(decoder),
    ]
    assert pairs[5][0].side == pairs[5][1].side == "decoder"


def test_constant_components_have_no_value(models):
    tensors = weights(models / "one")
    tensors["model.encoder.layers.1.fc2.weight"] *= 0  # the bias alone, for every token
    write_copy(models / "one", models / "bias", tensors)
    found = compared(models, "one", "bias")
    assert [found.left_out[name]["constant"] for name in ("first", "second")] == [
        [],
        ["model.encoder.layers.1.ffn"],
    ]
    assert [row["second"] for row in found.corresponding or [] if row["lns"] is None] == [
        "model.encoder.layers.1.ffn"
    ]
    known = [row["cka"] for row in rows_of(found, "encoder") if row["cka"] is not None]
    assert len(known) == 5
    assert found.mean["encoder"]["cka"] == pytest.approx(sum(known) / 5, abs=1e-6)
    assert None in found.matrices["cka"]["between"][0]


def test_one_stack_reads_plain_text():
    opened = {
        name: open_model(tiny_family(name, model_type))
        for name, model_type in (("bert", "bert"), ("gpt2", "gpt2"))
    }
    portions = portions_of(PlainText((Path("text.txt"),), LINES))
    found, _ = compare(opened, portions, OPTIONS)
    assert np.shape(found.matrices["lns"]["between"]) == (6, 6)
    assert found.corresponding == []  # an encoder and a decoder
    assert found.mean == {}


# Token means of what components add to the residual stream, against the stream itself, one sentence at a time.

SOURCES = ("the hen", "a", "the hat is in the inn", "no hen on the hat", "the tin")
TARGETS = ("la poule", "un", "le chapeau est dans une auberge", "pas", "etain")
PAIR = ("eng_Latn", "fra_Latn")


class Subject:
    def __init__(self, case: str = "gpt2", path: Path | None = None) -> None:
        path, self.case = path or tiny(Path("model"), case), case
        self.components = tuple(components(open_model(path)))
        self.model = load(path)
        tokenizer = load_tokenizer(path)
        if CASES[case].task != "translation":
            self.examples = text_examples(tokenizer, self.model, SOURCES)
        else:
            text = ParallelText("val", dict(zip(PAIR, (SOURCES, TARGETS), strict=True)))
            self.examples = translation_examples(tokenizer, self.model, text, [PAIR])

    def represent(self) -> dict[Component, Features]:
        return represent(InMemory(self.model), self.components, self.examples.batches(40))


def added(subject: Subject, sentence: int) -> dict[str, torch.Tensor]:
    """Component -> `[width]`: what the residual stream gains from one norm to the next, the mean over the tokens."""
    model, handles, stream = subject.model, [], {}
    for block in dict.fromkeys(component.block for component in subject.components):
        for suffix in ("", *(f".{norm}" for norm in CASES[subject.case].norms)):
            try:
                module = model.get_submodule(block + suffix)
            except AttributeError:  # an encoder has no cross-attention
                continue

            def keep(_module: Any, inputs: Any, output: Any, name: str = block + suffix) -> None:
                rows = output[0] if isinstance(output, tuple) else output
                # OPT's FFN has no axis of sentences.
                stream[name] = [states.reshape(-1, states.shape[-1]) for states in (inputs[0], rows)]

            handles.append(module.register_forward_hook(keep))
    with torch.inference_mode():
        model(**subject.examples.batch([sentence]).arguments(model))
    for handle in handles:
        handle.remove()
    found = {}
    for block in dict.fromkeys(component.block for component in subject.components):
        names = [name for name in stream if name.startswith(f"{block}.")]
        own = [component.name for component in subject.components if component.block == block]
        if LAYOUTS[subject.case].post_norm:
            before = [stream[block][0], *(stream[name][1] for name in names)]
            after = [stream[name][0] for name in names]
        else:
            before = [stream[name][0] for name in names]
            after = [*before[1:], stream[block][1]]
        for name, start, end in zip(own, before, after, strict=False):
            found[name] = (end - start).mean(dim=0)
    return found


def assert_means(subject: Subject, sentences: Sequence[int]) -> None:
    found = subject.represent()
    assert tuple(found) == subject.components
    for sentence in sentences:
        expected = added(subject, sentence)
        assert set(expected) == {component.name for component in found}
        for component, own in found.items():
            wanted = expected[component.name]
            np.testing.assert_allclose(own[sentence], wanted, rtol=1e-4, atol=1e-4, err_msg=component.name)


@pytest.mark.parametrize("case", OWN_SHAPES)
def test_each_is_the_mean_of_what_the_component_adds(case):
    subject = Subject(case)
    assert len({part.name for part in subject.components}) == len(subject.components)
    assert_means(subject, range(len(SOURCES)))


@pytest.mark.parametrize("case", ["bart", "llama"])
def test_a_shared_ffn_is_told_apart_by_layer(case):
    source = tiny(Path("source"), case)
    names = [ffn.name for ffn in open_model(source).layout.ffns]
    changes = {name: {"shared_with": names[0]} for name in names[1:]}
    assert_means(Subject(case, write_changed(source, Path("shared"), case, changes)), [2])


def test_nan_is_named_with_its_component_and_sentence():
    subject = Subject()
    with torch.no_grad():
        subject.model.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"transformer\.h\.1\.mlp: its output for sentence \d+ holds NaN"):
        subject.represent()


def test_a_component_without_an_output_for_each_token_is_refused():
    subject = Subject()
    subject.model.transformer.h[2].mlp.forward = lambda states: states[0, 0]  # one value for all tokens
    with pytest.raises(UnsupportedModelError, match="nothing can be measured by token"):
        subject.represent()


def test_a_full_disk_is_said(monkeypatch):
    subject = Subject()
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OutputError, match="no space left for the outputs"):
        subject.represent()
