"""Ablation with shared parts against whole runs of a model whose head's weights are zeroed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prunecli.errors import DataError
from prunecli.evaluation.decoding import DecodingOptions, translate
from prunecli.methods.heads.score import (
    HeadMask,
    batch_measurements,
    masks_of,
    measure_masked,
    translation_measurements,
)
from prunecli.modules.hooks import output_projections
from prunecli.running.batches import example_losses
from prunecli.text.parallel import ParallelText
from tests.methods.heads.test_score import LINES, PAIR, TEXT, Subject
from tests.reference.head_importance import scaled_head

DECODING = DecodingOptions(beam=2, batch_tokens=40, max_new_tokens=6)


@pytest.fixture(scope="module", params=("bart", "gpt2", "bert"))
def subject(request, tmp_path_factory):
    return Subject(tmp_path_factory.mktemp("model") / "tiny", request.param)


def zeroed(subject: Subject, mask: HeadMask) -> Any:
    """The output projection's part of the one head that `mask` removes is zero within the block."""
    projection: Any = output_projections(subject.model, subject.layers)[mask[0]]
    axis = 0 if type(projection).__name__ == "Conv1D" else 1
    return scaled_head(projection.weight, len(mask[1]), mask[1].index(0.0), axis, 0.0)


def single_losses(subject: Subject) -> list[float]:
    with torch.inference_mode():
        found = {
            batch.indices[0]: float(example_losses(subject.model, batch)[0]) for batch in subject.batches(1)
        }
    return [found[index] for index in sorted(found)]


def test_losses_without_each_head(subject):
    masks = masks_of(subject.layers, "ablation")
    measurements = batch_measurements(subject.model, {"val": subject.batches(40)}, "loss")
    examples, (base, *found) = measure_masked(subject.checkpoint, subject.model, measurements, masks)
    assert examples == [("val", index) for index in range(len(LINES))]
    np.testing.assert_allclose(base, single_losses(subject), rtol=1e-4)
    for mask, losses in list(zip(masks, found, strict=True))[::5]:
        with zeroed(subject, mask):
            np.testing.assert_allclose(losses, single_losses(subject), rtol=1e-4, err_msg=mask[0])
        assert losses != base
    np.testing.assert_allclose(base, single_losses(subject), rtol=1e-4)


def test_nothing_stays_behind(subject):
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in subject.model.modules()]
    broken = subject.batches(1000)[0]
    measurements = batch_measurements(subject.model, {"val": [broken]}, "loss")
    with torch.no_grad():
        kept = subject.model.get_input_embeddings().weight.clone()
        subject.model.get_input_embeddings().weight.fill_(float("nan"))
        with pytest.raises(DataError, match="val, example"):
            measure_masked(
                subject.checkpoint, subject.model, measurements, masks_of(subject.layers, "ablation")[:1]
            )
        subject.model.get_input_embeddings().weight.copy_(kept)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in subject.model.modules()] == before
    assert not any("forward" in vars(module) for module in subject.model.modules())


def test_translations_without_each_head(tmp_path):
    text = ParallelText("val", {language: lines[1:4] for language, lines in TEXT.sentences.items()})
    for model_type in ("nllb-moe", "m2m_100", "t5"):
        subject = Subject(tmp_path / model_type, model_type)
        masks = masks_of(subject.layers, "ablation")[::9]
        measurements = translation_measurements(subject.model, subject.tokenizer, text, PAIR, DECODING)
        _, (base, *found) = measure_masked(subject.checkpoint, subject.model, measurements, masks)
        sources = text.sentences[PAIR[0]]

        def whole(subject=subject, sources=sources):
            made = translate(subject.model, subject.tokenizer, sources, PAIR, DECODING)
            return [translation.text for translation in made]

        assert base == whole()
        for mask, texts in zip(masks, found, strict=True):
            with zeroed(subject, mask):
                assert texts == whole(), mask[0]


def test_only_one_head_of_a_layer(tmp_path):
    subject = Subject(tmp_path / "m", "bert")
    masks = masks_of(subject.layers, "all-but-one")
    assert len(masks) == 12
    assert masks[5] == (subject.layers[1].name, (0.0, 1.0, 0.0, 0.0))
    measurements = batch_measurements(subject.model, {"val": subject.batches(40)}, "loss")
    found = measure_masked(subject.checkpoint, subject.model, measurements, masks)[1][1 + 5]
    weight = output_projections(subject.model, subject.layers)[masks[5][0]].weight
    with (
        scaled_head(weight, 4, 0, 1, 0.0),
        scaled_head(weight, 4, 2, 1, 0.0),
        scaled_head(weight, 4, 3, 1, 0.0),
    ):
        np.testing.assert_allclose(found, single_losses(subject), rtol=1e-4)


def test_the_encoder_runs_once_per_batch_for_heads_of_the_decoder(tmp_path):
    subject = Subject(tmp_path / "m", "m2m_100")
    calls = []
    lowest, highest = subject.model.model.encoder.layers[0], subject.model.model.encoder.layers[-1]
    hooks = [
        module.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
        for number, module in enumerate((lowest, highest))
    ]
    decoding = replace(DECODING, max_new_tokens=1)
    measurements = translation_measurements(subject.model, subject.tokenizer, TEXT, PAIR, decoding)
    measure_masked(subject.checkpoint, subject.model, measurements, masks_of(subject.layers, "ablation"))
    for hook in hooks:
        hook.remove()
    assert calls.count(0) == len(measurements) * (1 + 4)  # the whole model, and its own four heads
    assert calls.count(1) == len(measurements) * (1 + 12)  # and all heads of the encoder's three layers
