"""Head importance against masks that are tensors in the graph; ablation against whole runs."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from prunecli.errors import DataError
from prunecli.evaluation.decoding import DecodingOptions, translate
from prunecli.methods.heads.score import (
    HeadMask,
    ScoreOptions,
    batch_measurements,
    masks_of,
    measure_masked,
    score_heads,
    translation_measurements,
)
from prunecli.methods.measuring import gradient_sums
from prunecli.model.axes import module_of
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.patchwork import module_name
from prunecli.modules.hooks import output_projections
from prunecli.running.batches import example_losses, task_batches
from prunecli.running.examples import Batch
from prunecli.running.layerwise.runner import Layerwise, Runner
from prunecli.running.runner import InMemory
from prunecli.text.choice import Dataset, TextChoice
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import load_tokenizer
from tests.families import tiny_family
from tests.families.records import CASES
from tests.methods.experts.test_collect import PAIRS, TEXT
from tests.methods.experts.test_layerwise import PLENTY
from tests.methods.test_measuring import lines
from tests.opening import load
from tests.reference.masks import mask_gradients, masking
from tests.running.layerwise.running import no_room
from tests.sentence_model import sentence_model
from tests.tiny import tiny_nllb_moe

PAIR = PAIRS[0]
LINES = TEXT.sentences[PAIR[0]]


class Subject:
    """A tiny checkpoint with its model, and batches of the text above for its task."""

    def __init__(self, path: Path | str, model_type: str) -> None:
        if model_type == "nllb-moe":
            tiny_nllb_moe(path, layers=2)
        else:
            tiny_family(path, model_type)
        self.checkpoint = open_model(path)
        self.layers = self.checkpoint.layout.attentions
        self.model = load(path)
        self.tokenizer = load_tokenizer(Path(path))
        self.data = lines(LINES, CASES[model_type].task)
        if self.data.task == "translation":
            self.data = Dataset("translation", TEXT, (PAIR,))

    def batches(self, batch_tokens: int) -> list[Batch]:
        return task_batches(self.tokenizer, self.model, self.data, batch_tokens)

    def gradients(self, runner: Runner, batches: Sequence[Batch]) -> None:
        gradient_sums(runner, self.checkpoint, axes_of(self.checkpoint, "head"), batches)


@pytest.fixture(scope="module", params=["bart", "gpt2", "bert"])
def subject(request, shared_path):
    return Subject(shared_path / request.param, request.param)


def test_parameters_get_no_gradients_and_no_hook_stays(subject):
    hooks = [len(m._forward_pre_hooks) for m in subject.model.modules()]
    subject.gradients(InMemory(subject.model), subject.batches(40))
    assert all(parameter.grad is None for parameter in subject.model.parameters())
    assert [len(m._forward_pre_hooks) for m in subject.model.modules()] == hooks


TEXTS = ("the hen", "a tin hat on the hen", "no", "the hat is in the inn")


class VectorSubject:
    """A tiny sentence encoder in float64, its vectors made text by text."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = sentence_model(path / "model"), path / "text.txt"
        self.file.write_text("\n".join(TEXTS) + "\n")
        self.layers = open_model(self.path).layout.own_attentions
        self.model = load(self.path).double()
        self.dense = load_file(self.path / "2_Dense" / "model.safetensors")["linear.weight"].double()
        self.ids = [load_tokenizer(self.path)(text)["input_ids"] for text in TEXTS]
        with torch.no_grad():
            self.whole = [self.unit(number, self.model) for number in range(len(TEXTS))]

    def unit(self, number: int, run: Any) -> torch.Tensor:
        hidden = run(input_ids=torch.tensor([self.ids[number]])).last_hidden_state[0]
        return functional.normalize(torch.tanh(self.dense @ hidden.mean(dim=0)), dim=0)

    @torch.no_grad()
    def cosine(self) -> float:
        """The mean cosine of the vectors of the model as it is now with those that it gave."""
        return float(np.mean([own @ self.unit(at, self.model) for at, own in enumerate(self.whole)]))

    def scores(self, **options: object) -> dict[str, np.ndarray]:
        made = ScoreOptions(device="cpu", dtype="float32", batch_tokens=20, **options)  # type: ignore[arg-type]
        found = score_heads(self.path, TextChoice(files=(self.file,)), made)
        assert (found.task, found.examples) == ("embedding", len(TEXTS))  # by itself, without a head
        return {module_of(name): np.array(own) for name, own in found.values.items()}


@pytest.fixture(scope="module")
def embedding_subject(shared_path):
    return VectorSubject(shared_path)


@pytest.mark.parametrize("memory", [None, 2 << 30])
def test_the_slope_along_a_random_direction(embedding_subject, memory):
    subject, total = embedding_subject, defaultdict(int)
    inputs = {
        layer.name: (module_name(subject.model, layer.output), (layer.count,)) for layer in subject.layers
    }
    for number in range(len(TEXTS)):
        row = torch.from_numpy(np.random.default_rng(number).standard_normal(8, np.float32)).double()

        def loss(run, number=number, row=row):
            return row @ subject.unit(number, run)

        for name, own in mask_gradients(subject.model, loss, inputs, {}, {}).items():
            total[name] += own.abs()
    found = subject.scores(memory=memory)
    for name, own in total.items():
        np.testing.assert_allclose(found[name], own, rtol=1e-3, atol=1e-5)


def test_the_cosine_without_each_head(embedding_subject):
    subject = embedding_subject
    found, projections = subject.scores(metric="ablation"), output_projections(subject.model, subject.layers)
    for layer in subject.layers:
        for head in range(layer.count):
            mask = [float(other != head) for other in range(layer.count)]
            with masking(projections[layer.name].weight, mask, 1):
                assert found[layer.name][head] == pytest.approx(subject.cosine(), abs=1e-5)


# Ablation with shared parts against whole runs of a model whose head's weights are zeroed.

DECODING = DecodingOptions(beam=2, batch_tokens=40, max_new_tokens=6)


def zeroed(subject: Subject, mask: HeadMask) -> AbstractContextManager[None]:
    """The output projection's parts of the heads that `mask` removes are zero within the block."""
    projection = output_projections(subject.model, subject.layers)[mask[0]]
    axis = 0 if type(projection).__name__ == "Conv1D" else 1
    return masking(projection.weight, mask[1], axis)


def single_losses(subject: Subject) -> list[float]:
    singles = sorted(subject.batches(1), key=lambda batch: batch.indices)
    with torch.inference_mode():
        return [float(example_losses(subject.model, batch)[0]) for batch in singles]


@pytest.mark.parametrize(
    ("method", "kept"), [("ablation", (1.0, 0.0, 1.0, 1.0)), ("all-but-one", (0.0, 1.0, 0.0, 0.0))]
)
def test_losses_without_each_head_or_the_others_of_its_layer(subject, method, kept):
    masks = masks_of(subject.layers, method)
    assert masks[5] == (subject.layers[1].name, kept)
    measurements = batch_measurements(subject.model, subject.batches(40), "loss")
    examples, (base, *found) = measure_masked(subject.checkpoint, subject.model, measurements, masks)
    assert [index for _, index in examples] == [*range(len(LINES))]
    np.testing.assert_allclose(base, single_losses(subject), rtol=1e-4)
    for mask, losses in list(zip(masks, found, strict=True))[::5]:
        with zeroed(subject, mask):
            np.testing.assert_allclose(losses, single_losses(subject), rtol=1e-4, err_msg=mask[0])
        assert losses != base
    np.testing.assert_allclose(base, single_losses(subject), rtol=1e-4)


def test_nothing_stays_behind(subject):
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in subject.model.modules()]
    measurements = batch_measurements(subject.model, subject.batches(1000), "loss")
    with torch.no_grad():
        kept = subject.model.get_input_embeddings().weight.clone()
        subject.model.get_input_embeddings().weight.fill_(float("nan"))
        with pytest.raises(DataError, match=", example 3: the loss is nan"):
            measure_masked(
                subject.checkpoint, subject.model, measurements, masks_of(subject.layers, "ablation")[:1]
            )
        subject.model.get_input_embeddings().weight.copy_(kept)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in subject.model.modules()] == before
    assert not any("forward" in vars(module) for module in subject.model.modules())


def test_translations_without_each_head():
    text = ParallelText("val", {language: lines[1:4] for language, lines in TEXT.sentences.items()})
    for model_type in ("nllb-moe", "m2m_100", "t5"):
        subject = Subject(model_type, model_type)
        masks = masks_of(subject.layers, "ablation")[::9]
        measurements = translation_measurements(subject.model, subject.tokenizer, text, PAIR, DECODING)
        _, (base, *found) = measure_masked(
            subject.checkpoint, subject.model, measurements, masks, decodes=True
        )
        sources = text.sentences[PAIR[0]]

        def whole(subject=subject, sources=sources):
            made = translate(subject.model, subject.tokenizer, sources, PAIR, DECODING)
            return [translation.text for translation in made]

        assert base == whole()
        for mask, texts in zip(masks, found, strict=True):
            with zeroed(subject, mask):
                assert texts == whole(), mask[0]


def test_the_encoder_runs_once_per_batch_for_heads_of_the_decoder():
    subject = Subject("m", "m2m_100")
    calls = []
    lowest, highest = subject.model.model.encoder.layers[0], subject.model.model.encoder.layers[-1]
    for number, module in enumerate((lowest, highest)):
        module.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    decoding = replace(DECODING, max_new_tokens=1)
    measurements = translation_measurements(subject.model, subject.tokenizer, TEXT, PAIR, decoding)
    masks = masks_of(subject.layers, "ablation")
    measure_masked(subject.checkpoint, subject.model, measurements, masks, decodes=True)
    assert calls.count(0) == len(measurements) * (1 + 4)  # the whole model, and its own four heads
    assert calls.count(1) == len(measurements) * (1 + 12)  # and all heads of the encoder's three layers


def test_what_is_reckoned_is_what_is_kept(monkeypatch):
    """The predicted memory of a group is enough, and little of it is left over."""
    subject, groups = Subject("model", "nllb-moe"), []
    real = Layerwise.groups
    monkeypatch.setattr(Layerwise, "groups", lambda *args: groups.append(real(*args)) or groups[0])
    no_room(monkeypatch, 0)
    runner = Layerwise(subject.checkpoint, torch.device("cpu"), torch.float32, PLENTY)
    subject.gradients(runner, subject.batches(1000))
    ((states,),) = (group.cost.states for group in groups[0])
    assert 0.4 * states < runner.report.spilled_bytes < 1.05 * states + 4096
