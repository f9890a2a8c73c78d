"""Gate statistics of language models by text, against single windows, in any batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.errors import UnsupportedModelError
from prunecli.methods.experts.batches import CollectOptions, Texts, text_windows
from prunecli.methods.experts.collect import score
from prunecli.model.checkpoint import open_model
from prunecli.modules.stock_experts import expert_modules
from prunecli.results.gates import TEXT_SUMS, GateStatistics
from prunecli.running.runner import InMemory
from prunecli.text.batching import marks_of, masked
from prunecli.text.plain import Corpus
from prunecli.text.tokens import load_tokenizer
from tests.reference.routed_outputs import sums
from tests.reference.stock_experts import block_inputs, every_output, expert_calls, switch_tokens
from tests.stock_mixtures import tiny_mixture, write_sentinels
from tests.tiny import write_plain_tokenizer

TEXTS = (
    Corpus("prose", (Path("a"),), ("the hen", "a", "the hat is in the inn", "no hen on the hat")),
    Corpus("code", (Path("b"),), ("if x: return y, else no", "x - 1")),
)
OPTIONS = CollectOptions(batch_tokens=24, context=8)


class Subject:
    """A tiny mixture with a tokenizer, and its checkpoint."""

    def __init__(self, folder: Path, model_type: str = "qwen3_moe", **config: Any) -> None:
        self.tokenizer, self.model = load_tokenizer(folder), tiny_mixture(model_type, **config)
        self.model.save_pretrained(folder)
        self.checkpoint = open_model(folder)

    def collect(self, options: CollectOptions = OPTIONS) -> GateStatistics:
        return score(InMemory(self.model), self.checkpoint, self.tokenizer, Texts(TEXTS, options))


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_plain_tokenizer(folder)
    return Subject(folder)


def test_sums_are_those_of_single_windows(subject):
    found = subject.collect()
    assert (found.mode, found.top_k, found.num_experts) == ("text", 2, 8)
    assert list(found.entries) == ["prose", "code"]
    model = subject.model
    model.set_experts_implementation("eager")
    modules = expert_modules(model)
    for corpus in TEXTS:
        routed = [[] for _ in modules]
        for document in corpus.documents:
            ids = subject.tokenizer(document)["input_ids"]
            for start in range(0, len(ids), 8):
                with torch.inference_mode():
                    calls = expert_calls(model, modules, input_ids=torch.tensor([ids[start : start + 8]]))
                    for index, (name, (hidden, experts, weights)) in enumerate(calls.items()):
                        norms = every_output(modules[name], hidden).norm(dim=-1).T.gather(1, experts)
                        routed[index] += zip(experts.tolist(), weights.tolist(), norms.tolist(), strict=True)
        entry = found.entries[corpus.name]
        assert entry.tokens.tolist() == [len(tokens) for tokens in routed]
        for index, tokens in enumerate(routed):
            for name, expected in sums(tokens, 8).items():
                np.testing.assert_allclose(
                    getattr(entry, name)[index], expected, rtol=1e-4, atol=1e-6, err_msg=name
                )


def test_batches_change_nothing(subject):
    whole, single = (subject.collect(CollectOptions(batch_tokens=size, context=8)) for size in (4096, 1))
    for text, entry in whole.entries.items():
        for name in TEXT_SUMS:
            np.testing.assert_allclose(
                getattr(entry, name), getattr(single.entries[text], name), rtol=1e-4, atol=1e-6
            )


@pytest.fixture(scope="module")
def restoring(tmp_path_factory):
    """An encoder with a decoder whose experts overflow, and a tokenizer with sentinels."""
    folder = tmp_path_factory.mktemp("restoring")
    write_sentinels(folder)
    return Subject(folder, "switch_transformers", vocab_size=80, expert_capacity=2)


def test_an_encoder_reads_masked_text_and_its_decoder_what_was_masked(restoring):
    options = CollectOptions(batch_tokens=40, context=16)
    found = restoring.collect(options)
    assert (found.mode, found.top_k) == ("text", 1)
    assert [name.split(".")[0] for name in found.layers] == ["encoder", "encoder", "decoder", "decoder"]
    model, marks = restoring.model, marks_of(restoring.tokenizer)
    for corpus in TEXTS:
        routed = [[] for _ in found.layers]
        for window in text_windows(restoring.tokenizer, corpus, 16):
            inputs, targets = masked(window, marks)
            sides = {
                "input_ids": torch.tensor([inputs]),
                "decoder_input_ids": torch.tensor([[0, *targets[:-1]]]),
            }
            with torch.inference_mode():
                blocks = block_inputs(model, "SwitchTransformersSparseMLP", **sides)
                for index, (block, hidden) in enumerate(blocks.values()):
                    routed[index] += switch_tokens(block, hidden, 2)
        entry = found.entries[corpus.name]
        assert entry.tokens.tolist() == [len(tokens) for tokens in routed]
        assert (entry.routed.sum(axis=1) <= entry.tokens).all()
        for index, tokens in enumerate(routed):
            for name, expected in sums(tokens, 8).items():
                np.testing.assert_allclose(
                    getattr(entry, name)[index], expected, rtol=1e-4, atol=1e-6, err_msg=name
                )


def test_windows_do_not_overlap_and_hold_every_token(subject):
    corpus = TEXTS[0]
    rows = [subject.tokenizer(document)["input_ids"] for document in corpus.documents]
    windows = text_windows(subject.tokenizer, corpus, 5)
    assert [token for window in windows for token in window] == [token for row in rows for token in row]
    assert max(map(len, windows)) == 5
    assert len(windows) == sum(-(-len(row) // 5) for row in rows)


@pytest.mark.parametrize("most", [7, 8])
def test_no_more_than_so_many_tokens(subject, most):
    every = [token for window in text_windows(subject.tokenizer, TEXTS[0], 5) for token in window]
    some = [token for window in text_windows(subject.tokenizer, TEXTS[0], 5, most) for token in window]
    assert some == every[:most]


def test_a_model_that_is_no_language_model_is_refused(subject):
    held = InMemory(subject.model.base_model)
    with pytest.raises(UnsupportedModelError, match="no head"):
        score(held, subject.checkpoint, subject.tokenizer, Texts(TEXTS))


def test_the_key_is_that_of_the_texts_and_how_they_are_cut():
    keys = [
        Texts(TEXTS).key,
        Texts(TEXTS[:1]).key,
        Texts(TEXTS, OPTIONS).key,
        Texts((Corpus("other", (), TEXTS[0].documents), TEXTS[1])).key,
        Texts(TEXTS, CollectOptions(max_tokens=9)).key,
    ]
    assert len({str(key) for key in keys}) == len(keys)
