"""Token means of what components add to the residual stream, against the stream itself, one sentence at a time."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.analysis.model_similarity import Component, Features, components, represent
from prunecli.errors import DataError, OutputError, UnsupportedModelError
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.running.encoding import text_examples, translation_examples
from prunecli.running.runner import InMemory
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import encode, load_tokenizer
from tests.families.records import CASES
from tests.ffn_layouts import LAYOUTS, OWN_SHAPES, tiny, write_changed
from tests.reference import similarity as reference

SOURCES = ("the hen", "a", "the hat is in the inn", "no hen on the hat", "the tin")
TARGETS = ("la poule", "un", "le chapeau est dans une auberge", "pas", "etain")
PAIR = ("eng_Latn", "fra_Latn")


class Subject:
    def __init__(self, path: Path, case: str) -> None:
        self.case = case
        self.components = components(open_model(path))
        self.model = load_model(path, device="cpu", dtype="float32")
        self.tokenizer = load_tokenizer(path)

    def represent(self, directory: Path, batch_tokens: int = 40) -> dict[Component, Features]:
        directory.mkdir()
        if CASES[self.case].task != "translation":
            batches = text_examples(self.tokenizer, self.model, SOURCES).batches(batch_tokens)
        else:
            text = ParallelText("val", dict(zip(PAIR, (SOURCES, TARGETS), strict=True)))
            batches = translation_examples(self.tokenizer, self.model, text, [PAIR]).batches(batch_tokens)
        return represent(InMemory(self.model), self.components, batches, directory)

    def alone(self, sentence: int) -> dict[str, torch.Tensor]:
        """The inputs of one sentence without any padding."""
        if CASES[self.case].task != "translation":
            return {"input_ids": torch.tensor([self.tokenizer(SOURCES[sentence])["input_ids"]])}
        source = encode(self.tokenizer, [SOURCES[sentence]], PAIR[0])
        target = encode(self.tokenizer, [TARGETS[sentence]], PAIR[1], as_target=True)
        return {"input_ids": torch.tensor(source), "labels": torch.tensor(target)}


def added(subject: Subject, sentence: int) -> dict[str, list[list[float]]]:
    """Component -> `[tokens, width]`: what the residual stream gains between one norm and the next."""
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    model, handles = subject.model, []
    for block in dict.fromkeys(component.block for component in subject.components):
        for suffix in ("", *(f".{norm}" for norm in CASES[subject.case].norms)):
            try:
                module = model.get_submodule(block + suffix)
            except AttributeError:  # an encoder has no cross-attention
                continue

            def keep(_module: Any, inputs: Any, output: Any, name: str = block + suffix) -> None:
                rows = output[0] if isinstance(output, tuple) else output
                # OPT's FFN has no axis of sentences.
                seen.append((name, *(x.reshape(1, -1, x.shape[-1]) for x in (inputs[0], rows))))

            handles.append(module.register_forward_hook(keep))
    with torch.inference_mode():
        model(
            **subject.alone(sentence), **({} if CASES[subject.case].task == "mlm" else {"use_cache": False})
        )
    for handle in handles:
        handle.remove()
    stream = {name: (before[0], after[0]) for name, before, after in seen}
    found: dict[str, list[list[float]]] = {}
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
            found[name] = (end - start).tolist()
    return found


@pytest.mark.parametrize("case", OWN_SHAPES)
def test_each_is_the_mean_of_what_the_component_adds(case, tmp_path):
    subject = Subject(tiny(tmp_path / "model", case), case)
    assert len({part.name for part in subject.components}) == len(subject.components)
    found = subject.represent(tmp_path / "files")
    assert tuple(found) == subject.components
    for sentence in range(len(SOURCES)):
        expected = added(subject, sentence)
        assert set(expected) == {component.name for component in found}
        for component, outputs in expected.items():
            own = next(rows for held, rows in found.items() if held.name == component)
            mean = reference.token_mean(outputs, len(outputs))
            np.testing.assert_allclose(own[sentence], mean, rtol=1e-4, atol=1e-4, err_msg=component)


@pytest.mark.parametrize("case", ["t5", "gpt2"])
def test_batches_change_nothing(case, tmp_path):
    subject = Subject(tiny(tmp_path / "model", case), case)
    one, all_at_once = (subject.represent(tmp_path / str(tokens), tokens) for tokens in (1, 4096))
    for first, second in zip(one.values(), all_at_once.values(), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["bart", "llama"])
def test_a_shared_ffn_is_told_apart_by_layer(case, tmp_path):
    source = tiny(tmp_path / "source", case)
    names = [ffn.name for ffn in open_model(source).layout.ffns]
    changes = {name: {"shared_with": names[0]} for name in names[1:]}
    subject = Subject(write_changed(source, tmp_path / "shared", case, changes), case)
    found = subject.represent(tmp_path / "files")
    expected = added(subject, 2)
    for component, features in found.items():
        mean = reference.token_mean(expected[component.name], len(expected[component.name]))
        np.testing.assert_allclose(features[2], mean, rtol=1e-4, atol=1e-4, err_msg=component.name)


@pytest.mark.parametrize("case", ["bart", "gpt2"])
def test_removed_ffns_are_left_out(case, tmp_path):
    source = tiny(tmp_path / "source", case)
    ffns = open_model(source).layout.ffns[1:]
    gone, changes = [ffn.own_name for ffn in ffns], {ffn.name: {"removed": True} for ffn in ffns}
    subject = Subject(write_changed(source, tmp_path / "less", case, changes), case)
    assert [part.name for part in subject.components if part.removed] == gone
    found = subject.represent(tmp_path / "files")
    assert not {part.name for part in found} & set(gone)
    assert len(found) == len(subject.components) - len(gone)


def test_components_in_the_order_of_a_token_with_the_labels_of_the_paper(tmp_path):
    found = components(open_model(tiny(tmp_path / "model", "m2m_100")))
    assert [part.label for part in found] == [
        *(f"{layer}.{kind}" for layer in range(3) for kind in ("sa", "ffn")),
        *(f"{layer}.{kind}" for layer in range(2) for kind in ("sa", "ca", "ffn")),
    ]
    assert [part.side for part in found] == ["encoder"] * 6 + ["decoder"] * 6


def test_nan_is_named_with_its_component_and_sentence(tmp_path):
    subject = Subject(tiny(tmp_path / "model", "gpt2"), "gpt2")
    with torch.no_grad():
        subject.model.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    with pytest.raises(DataError, match=r"transformer\.h\.1\.mlp: its output for sentence \d+ holds NaN"):
        subject.represent(tmp_path / "files")


def test_a_component_without_an_output_for_each_token_is_refused(tmp_path):
    subject = Subject(tiny(tmp_path / "model", "gpt2"), "gpt2")
    subject.model.transformer.h[2].mlp.forward = lambda states: states[0, 0]  # one value for all tokens
    with pytest.raises(
        UnsupportedModelError, match=r"transformer\.h\.2\.mlp: its output has the shape \[32\]"
    ):
        subject.represent(tmp_path / "files")


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    subject = Subject(tiny(tmp_path / "model", "gpt2"), "gpt2")
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OutputError, match="no space left for the outputs"):
        subject.represent(tmp_path / "files")
