"""Head importance against |dL/dxi_h| by differences, one example at a time; ablation against whole runs."""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

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
from prunecli.modules.hooks import output_projections
from prunecli.results.unit_scores import Per
from prunecli.running.batches import example_losses
from prunecli.running.encoding import (
    lm_windows,
    mlm_examples,
    padding_id,
    translation_examples,
    window_examples,
)
from prunecli.running.examples import Batch, Examples
from prunecli.running.layerwise.runner import Layerwise, Runner, RunReport
from prunecli.running.runner import InMemory
from prunecli.text.choice import TextChoice
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import encode, load_tokenizer
from tests.families import tiny_family
from tests.families.records import CASES, FAMILIES, own_layouts
from tests.methods.experts.test_collect import PAIRS, TEXT
from tests.methods.experts.test_layerwise import PLENTY
from tests.opening import load
from tests.reference import head_importance as reference
from tests.reference.losses import causal_nll, masked_loss, translation_loss
from tests.running.layerwise.running import no_room
from tests.sentence_model import sentence_model
from tests.tiny import tiny_nllb_moe

PAIR = PAIRS[0]
LINES = TEXT.sentences[PAIR[0]]
HeadSums = dict[str, np.ndarray]


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
        self.task = CASES[model_type].task

    def batches(self, batch_tokens: int) -> list[Batch]:
        examples: Examples
        if self.task == "translation":
            examples = translation_examples(self.tokenizer, self.model, TEXT, [PAIR])
        elif self.task == "mlm":
            examples = mlm_examples(self.tokenizer, self.model, LINES)
        else:
            windows = lm_windows(self.tokenizer, self.model, LINES)
            examples = window_examples(windows, padding_id(self.model, self.tokenizer))
        return examples.batches(batch_tokens)

    def importance(self, runner: Runner, batches: Sequence[Batch], **more: Any) -> HeadSums:
        """Name of an attention -> sums of its heads."""
        axes = axes_of(self.checkpoint, "head")
        sums = gradient_sums(runner, self.checkpoint, axes, batches, **more)
        return {module_of(name): own for name, own in sums.items()}

    def score(self, batch_tokens: int = 40, per: Per = "example") -> HeadSums:
        return self.importance(InMemory(self.model), self.batches(batch_tokens), per=per)


SUBJECTS = (*own_layouts(FAMILIES), "gemma2")
"""Families of every layout, and of the others two whose norms lie elsewhere."""


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request, shared_path):
    return Subject(shared_path / request.param, request.param)


def losses_of(subject: Subject, model: Any) -> list[Callable[[], float]]:
    """One loss per example, from the logits of `model` alone."""
    tokenizer = subject.tokenizer
    if subject.task == "translation":
        sources = encode(tokenizer, TEXT.sentences[PAIR[0]], PAIR[0])
        targets = encode(tokenizer, TEXT.sentences[PAIR[1]], PAIR[1], as_target=True)
        return [lambda s=s, t=t: translation_loss(model, s, t) for s, t in zip(sources, targets, strict=True)]
    if subject.task == "lm":
        start = tokenizer.bos_token_id
        rows = [tokenizer(line)["input_ids"] for line in LINES]
        rows = [row if row[0] == start else [start, *row] for row in rows]
        return [lambda row=row: causal_nll(model, row, len(row) - 1) / (len(row) - 1) for row in rows]
    singles = sorted(subject.batches(1), key=lambda batch: batch.indices)
    rows = [(batch.inputs["input_ids"][0].tolist(), batch.labels[0].tolist()) for batch in singles]
    return [lambda row=row: masked_loss(model, *row) for row in rows]


def assert_slopes(found: np.ndarray, model: Any, slopes: Callable[[float], Any]) -> None:
    """`slopes` are those by differences of the losses, whose step depends on the types that the model computes in."""
    exact = not CASES[model.config.model_type].float32_parts
    step, tolerance = (1e-5, 1e-4) if exact else (1e-3, 2e-3)
    np.testing.assert_allclose(found, slopes(step), rtol=10 * tolerance, atol=tolerance)
    assert found.dtype == np.float64
    assert (found > 0).all()


@torch.no_grad()
def test_it_is_the_derivative_by_the_mask(subject):
    found, model = subject.score(), copy.deepcopy(subject.model).double()
    losses = losses_of(subject, model)
    assert list(found) == [layer.name for layer in subject.layers]
    for name, projection in list(output_projections(model, subject.layers).items())[::2]:
        assert_slopes(found[name], model, partial(reference.importance, losses, projection, len(found[name])))


@pytest.mark.parametrize("subject", ["nllb-moe", "bart", "bert", "gpt2", "llama"], indirect=True)
@torch.no_grad()
def test_per_token_it_is_the_derivative_by_the_mask_of_each_position(subject):
    model = copy.deepcopy(subject.model).double()
    batch = sorted(subject.batches(1), key=lambda batch: batch.inputs["input_ids"].numel())[1]
    found = subject.importance(InMemory(subject.model), [batch], per="token")
    loss = losses_of(subject, model)[batch.indices[0]]
    projections, seen = output_projections(model, subject.layers), set()
    for layer in subject.layers:
        if layer.kind in seen:
            continue
        seen.add(layer.kind)
        side = "attention_mask" if layer.kind == "encoder" else "decoder_attention_mask"
        positions = batch.inputs.get(side, batch.inputs["attention_mask"]).shape[1]
        given = [loss], projections[layer.name], len(found[layer.name])
        slopes = partial(reference.importance, *given, positions=range(positions))
        assert_slopes(found[layer.name], model, slopes)


def test_parameters_get_no_gradients_and_ask_for_them_again_afterwards(subject):
    asking = [parameter.requires_grad for parameter in subject.model.parameters()]
    hooks = [len(m._forward_pre_hooks) for m in subject.model.modules()]
    subject.score()
    assert [parameter.requires_grad for parameter in subject.model.parameters()] == asking
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
        self.projections = output_projections(self.model, self.layers)
        self.dense = load_file(self.path / "2_Dense" / "model.safetensors")["linear.weight"]
        self.ids = [load_tokenizer(self.path)(text)["input_ids"] for text in TEXTS]

    def unit(self, number: int) -> np.ndarray:
        with torch.no_grad():
            hidden = self.model(input_ids=torch.tensor([self.ids[number]])).last_hidden_state[0]
        vector = np.tanh(self.dense.astype(np.float64) @ hidden.numpy().mean(0))
        return np.asarray(vector / np.linalg.norm(vector))

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
    drawn = [np.random.default_rng(number).standard_normal(8, np.float32) for number in range(len(TEXTS))]
    losses = [lambda n=n, row=row: float(row @ embedding_subject.unit(n)) for n, row in enumerate(drawn)]
    found = embedding_subject.scores(memory=memory)
    for name, projection in embedding_subject.projections.items():
        want = reference.importance(losses, projection, len(found[name]), 1e-4)
        np.testing.assert_allclose(found[name], want, rtol=1e-3, atol=1e-5)


def test_the_cosine_without_each_head(embedding_subject):
    whole = [embedding_subject.unit(number) for number in range(len(TEXTS))]
    found = embedding_subject.scores(metric="ablation")
    for layer in embedding_subject.layers:
        for head in range(layer.count):
            with reference.scaled_head(embedding_subject.projections[layer.name], layer.count, head, 0.0):
                near = [vector @ embedding_subject.unit(number) for number, vector in enumerate(whole)]
                want = np.mean(near)
            assert found[layer.name][head] == pytest.approx(want, abs=1e-5)


# Ablation with shared parts against whole runs of a model whose head is zeroed.

DECODING = DecodingOptions(beam=2, batch_tokens=40, max_new_tokens=6)


ablated = pytest.mark.parametrize("subject", ["bart", "gpt2", "bert"], indirect=True)


def zeroed(subject: Subject, mask: HeadMask) -> Any:
    """Within the block the head that `mask` removes is zero."""
    projection = output_projections(subject.model, subject.layers)[mask[0]]
    return reference.scaled_head(projection, len(mask[1]), mask[1].index(0.0), 0.0)


def single_losses(subject: Subject) -> list[float]:
    singles = sorted(subject.batches(1), key=lambda batch: batch.indices)
    with torch.inference_mode():
        return [float(example_losses(subject.model, batch)[0]) for batch in singles]


@ablated
def test_losses_without_each_head(subject):
    masks = masks_of(subject.layers, "ablation")
    measurements = batch_measurements(subject.model, subject.batches(40), "loss")
    examples, (base, *found) = measure_masked(subject.checkpoint, subject.model, measurements, masks)
    assert examples == [("", index) for index in range(len(LINES))]
    np.testing.assert_allclose(base, single_losses(subject), rtol=1e-4)
    for mask, losses in list(zip(masks, found, strict=True))[::5]:
        with zeroed(subject, mask):
            np.testing.assert_allclose(losses, single_losses(subject), rtol=1e-4, err_msg=mask[0])
        assert losses != base
    np.testing.assert_allclose(base, single_losses(subject), rtol=1e-4)


@ablated
def test_nothing_stays_behind(subject):
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in subject.model.modules()]
    broken = replace(subject.batches(1000)[0], text="val")
    measurements = batch_measurements(subject.model, [broken], "loss")
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


def test_only_one_head_of_a_layer():
    subject = Subject("m", "bert")
    masks = masks_of(subject.layers, "all-but-one")
    assert len(masks) == 12
    assert masks[5] == (subject.layers[1].name, (0.0, 1.0, 0.0, 0.0))
    measurements = batch_measurements(subject.model, subject.batches(40), "loss")
    found = measure_masked(subject.checkpoint, subject.model, measurements, masks)[1][1 + 5]
    projection = output_projections(subject.model, subject.layers)[masks[5][0]]
    with ExitStack() as others:
        for head in (0, 2, 3):
            others.enter_context(reference.scaled_head(projection, 4, head, 0.0))
        np.testing.assert_allclose(found, single_losses(subject), rtol=1e-4)


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


# Importance layer by layer against that of the whole model.


CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Relative; the gradients of an encoder's output are summed layer by layer, in another order than in memory."""


def layered(subject: Subject, batches: list[Batch], **more: Any) -> tuple[HeadSums, RunReport]:
    runner = Layerwise(open_model(subject.checkpoint.path), CPU, torch.float32, PLENTY)
    found = subject.importance(runner, batches, **more)
    assert all(parameter.grad is None for parameter in runner.model.parameters())
    return found, runner.report


def assert_close(found: HeadSums, wanted: HeadSums) -> None:
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert (values > 0).all()
        np.testing.assert_allclose(found[name], values, rtol=TOLERANCE)
        assert found[name].dtype == np.float64


@pytest.mark.parametrize("model_type", ["nllb-moe", "t5", "bert", "gpt2", "gemma2"])
def test_every_family(model_type):
    subject = Subject("model", model_type)
    per = "token" if model_type in ("nllb-moe", "t5", "bert", "gpt2") else "example"
    batches, wanted = subject.batches(40), subject.score(40, per)
    assert len(batches) > 1
    found, work = layered(subject, batches, per=per)
    assert_close(found, wanted)
    if CASES[model_type].task != "translation":
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)  # to the last bit
    assert work.readings == 1
    assert work.bytes_read < 2 * subject.checkpoint.total_bytes


def test_what_is_reckoned_is_what_is_kept(monkeypatch):
    """The predicted memory of a group is enough, and little of it is left over."""
    subject, groups = Subject("model", "nllb-moe"), []
    real = Layerwise.groups
    monkeypatch.setattr(Layerwise, "groups", lambda *args: groups.append(real(*args)) or groups[0])
    no_room(monkeypatch, 0)
    _, work = layered(subject, subject.batches(1000))
    ((states,),) = (group.cost.states for group in groups[0])
    assert 0.4 * states < work.spilled_bytes < 1.05 * states + 4096
