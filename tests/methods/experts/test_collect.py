"""Gate statistics against a plain count over single sentences."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from prunecli.commands.measure import collect_gates
from prunecli.errors import DataError, PruneError
from prunecli.methods.experts import collect
from prunecli.methods.experts.batches import CollectOptions, Translation
from prunecli.methods.experts.collect import PartialRun, State, read_state, score, write_state
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import sparse_ffns
from prunecli.results.gates import SUMS, GateStatistics
from prunecli.running.runner import InMemory
from prunecli.text.parallel import ParallelText
from prunecli.text.tokens import encode, load_tokenizer
from tests.commands.calls import call
from tests.opening import load
from tests.reference import routed_outputs
from tests.running.layerwise.running import StopError
from tests.tiny import change_config, tiny_nllb_moe

TEXT = ParallelText(
    "val",
    {
        "eng_Latn": ("the hen", "a", "the hat is in the inn", "no hen on the hat", "the tin"),
        "fra_Latn": ("la poule", "un", "le chapeau est dans une auberge", "pas", "etain"),
        "deu_Latn": ("die henne", "ein hut", "der hut ist", "keine henne auf dem hut in dem haus", "zinn"),
    },
)
PAIRS = [("eng_Latn", "fra_Latn"), ("eng_Latn", "deu_Latn"), ("fra_Latn", "eng_Latn")]
MODES = [CollectOptions(mode="forced", batch_tokens=40), CollectOptions(mode="beam", beam=3, batch_tokens=40)]


class Subject:
    def __init__(self, path: Path) -> None:
        self.checkpoint = open_model(path)
        self.model, self.tokenizer = load(path), load_tokenizer(path)

    def collect(self, options: CollectOptions, **more: Any) -> GateStatistics:
        pairs = PAIRS if options.mode == "forced" else PAIRS[1:]  # two sources; searches are slow
        material = Translation(TEXT, pairs, options)
        return score(InMemory(self.model), self.checkpoint, self.tokenizer, material, **more)


@pytest.fixture(scope="module")
def subject(shared_path):
    return Subject(tiny_nllb_moe(shared_path / "tiny"))


@pytest.fixture(scope="module")
def searched(shared_path):
    """The model with few positions, at which endless searches end."""
    path = tiny_nllb_moe(shared_path / "searched")
    change_config(path, max_position_embeddings=16)
    return Subject(path)


def forced_by_hand(subject: Subject, source: str, target: str) -> list[list[routed_outputs.Token]]:
    """Per sparse layer the gates of every token, of all experts, sentence by sentence, through the whole model."""
    layers = []
    sources = encode(subject.tokenizer, TEXT.sentences[source], source)
    labels = encode(subject.tokenizer, TEXT.sentences[target], target, as_target=True)
    with torch.inference_mode(), ExitStack() as hooks:
        for module in sparse_ffns(subject.model).values():
            layers.append(own := [])

            def note(_module: Any, _inputs: Any, logits: torch.Tensor, own: Any = own) -> None:
                gates = torch.softmax(logits.double(), -1).tolist()
                own.extend((range(len(gate)), gate, gate) for gate in gates)

            hooks.enter_context(module.router.classifier.register_forward_hook(note))
        for ids, label in zip(sources, labels, strict=True):
            subject.model(input_ids=torch.tensor([ids]), labels=torch.tensor([label]))
    return layers


@pytest.mark.parametrize("pair", PAIRS[1:])
def test_forced_sums_are_those_of_single_sentences(subject, pair):
    found = subject.collect(MODES[0]).entries["-".join(pair)]
    for index, gates in enumerate(forced_by_hand(subject, *pair)):
        assert found.tokens[index] == len(gates)
        wanted = routed_outputs.sums(gates, found.top1.shape[1])
        for name in SUMS[1:]:
            np.testing.assert_allclose(found[name][index], wanted[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", MODES, ids=lambda options: options.mode)
def test_batches_change_nothing(subject, searched, options):
    subject = searched if options.mode == "beam" else subject
    single = options.updated(batch_tokens=1)
    ours, alone = subject.collect(options).entries, subject.collect(single).entries
    torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)


@contextmanager
def rows_of(stack: Any) -> Iterator[list[int]]:
    """The number of rows in each pass through a stack within the block."""
    rows = []
    with stack.register_forward_hook(lambda _m, _a, out: rows.append(len(out.last_hidden_state))):
        yield rows


def test_beam_search_counts_every_step_of_every_beam(subject):
    """One sentence alone: the tokens of the decoder are the steps that `generate` makes, times the beams."""
    text = ParallelText("val", {name: lines[:1] for name, lines in TEXT.sentences.items()})
    material = Translation(text, PAIRS[:1], MODES[1])
    with rows_of(subject.model.get_decoder()) as steps:
        found = score(InMemory(subject.model), subject.checkpoint, subject.tokenizer, material)
    assert found.entries["eng_Latn-fra_Latn"].tokens[-1] == sum(steps)
    assert set(steps) == {3}


def test_the_encoder_runs_once_whatever_the_number_of_targets(subject):
    with rows_of(subject.model.get_encoder()) as seen:
        found = subject.collect(MODES[0])
    assert sum(seen) == 10  # five English and five French sentences, though English has two targets
    assert np.array_equal(
        found.entries["eng_Latn-fra_Latn"].top1[:2], found.entries["eng_Latn-deu_Latn"].top1[:2]
    )


@pytest.mark.parametrize("options", MODES, ids=lambda options: options.mode)
def test_an_interrupted_run_goes_on_to_the_same_bytes(subject, searched, options, tmp_path):
    subject = searched if options.mode == "beam" else subject
    batches = []
    whole = subject.collect(options, save=batches.append).to_json()
    assert len(batches) > 2
    for stop in {1, len(batches) // 2, len(batches) - 1}:
        path, key = tmp_path / f"{stop}.partial", {"run": 1}

        def save(state, stop=stop, path=path, key=key):
            write_state(path, key, state)
            if state.batches == stop:
                raise StopError

        with pytest.raises(StopError):
            subject.collect(options, save=save)
        state = read_state(path, key)
        assert state.batches == stop
        assert subject.collect(options, state=state).to_json() == whole


def test_an_unknown_language_is_refused_before_anything_runs(subject):
    text = ParallelText("val", {**TEXT.sentences, "eng_Cyrl": ("a",) * 5})
    material = Translation(text, [("eng_Latn", "eng_Cyrl")], MODES[0])
    with pytest.raises(DataError, match="eng_Cyrl"):
        score(InMemory(subject.model), subject.checkpoint, subject.tokenizer, material)


def test_observers_are_gone_afterwards_even_after_a_failure(searched):
    subject = searched

    with pytest.raises(StopError):
        subject.collect(MODES[1], save=Mock(side_effect=StopError))
    assert all(module.observer is None for module in sparse_ffns(subject.model).values())
    assert "_beam_search_has_unfinished_sequences" not in vars(subject.model)


def end_early(run: PartialRun) -> None:
    with run.kept():
        run.save(State(3, {}))
        raise PruneError("another process has ended")


def test_a_signal_while_it_ends_waits_until_all_is_kept_and_said(tmp_path, monkeypatch):
    write, said = collect.write_json, list[str]()

    def disturbed(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        write(*arguments, **options)

    monkeypatch.setattr(collect, "write_json", disturbed)
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit):
            end_early(PartialRun(tmp_path / "g", {}, say=said.append))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == [f"Kept in {tmp_path / '.g.partial'}: the same command resumes from it."]
    assert collect.read_state(tmp_path / ".g.partial", {}).batches == 3


@pytest.mark.parametrize("batches", [-1, 4, None])
def test_a_state_whose_numbers_were_damaged_is_left_aside(tmp_path, batches):
    path = tmp_path / "state"
    collect.write_state(path, {"a": 1}, State(3, {}))
    assert collect.read_state(path, {"a": 1}) == State(3, {})
    path.write_text(path.read_text().replace('"batches": 3', f'"batches": {json.dumps(batches)}'))
    assert collect.read_state(path, {"a": 1}) is None


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "score", None)  # not called: the result would be lost
    refused = call(collect_gates, "-o", str(tmp_path / "no" / "gates.json"))
    assert refused.status == 1
    assert f"{tmp_path / 'no'}: no such directory" in refused.err
