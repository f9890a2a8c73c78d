from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from prunecli.errors import CheckpointError, DataError, PruneError, UsageError
from prunecli.evaluation import hardware
from prunecli.evaluation import latency as module
from prunecli.evaluation.hardware import fit_together
from prunecli.evaluation.latency import LatencyOptions, decode, time_decoding
from prunecli.evaluation.memory import MemoryTask, measure_cost, peak_resident
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.results.latency import Spread
from tests.families import tiny_family
from tests.tiny import tiny_nllb_moe

SENTENCES = ("the hat", "a hen in the inn", "no")
CPU = torch.device("cpu")
PAIR = ("eng_Latn", "fra_Latn")
OPTIONS = LatencyOptions(beams=(1, 2), batch_sizes=(1, 2), runs=2, new_tokens=4, device="cpu", memory=False)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latency")
    return {n: tiny_nllb_moe(folder / n, experts=e) for n, e in {"full": 8, "pruned": 4}.items()}


@pytest.fixture
def turns(monkeypatch):
    """Which checkpoint decoded which batch, in order, on a clock that the checkpoint drives."""
    seen: list[tuple[str, int, int]] = []
    clock = [0.0]
    real = module._Runner._model

    def model(self, subject):
        self.at_hand = subject.label
        found = real(self, subject)
        found.label = subject.label
        return found

    def decode(model, sources, beam, new_tokens, pad_id, forced_id):
        seen.append((model.label, len(sources), beam))
        clock[0] += {"full": 2.0, "pruned": 0.5}[model.label] * len(sources)

    monkeypatch.setattr(module._Runner, "_model", model)
    monkeypatch.setattr(module, "decode", decode)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    return seen


def test_results_by_hand(checkpoints, turns):
    payload = time_decoding(checkpoints, SENTENCES, PAIR, OPTIONS).to_json()
    assert payload["format"] == "prunecli.latency/1"
    assert (payload["sentences"], payload["new_tokens"], payload["pair"]) == (3, 4, "eng_Latn-fra_Latn")
    assert payload["threads"] == torch.get_num_threads()
    full, pruned = payload["results"]
    configs = [(timing["batch_size"], timing["beam"]) for timing in full["timings"]]
    assert configs == [(1, 1), (1, 2), (2, 1), (2, 2)]
    # 3 sentences x 2 s; 3 x 4 tokens in 6 s; the pruned one takes 0.5 s a sentence
    assert full["timings"][0]["seconds"] == [6.0, 6.0]
    assert full["timings"][0]["tokens_per_second"] == {"mean": 2.0, "std": 0.0}
    assert pruned["timings"][0]["seconds_per_sentence"] == {"mean": 0.5, "std": 0.0}
    assert pruned["timings"][0]["speedup"] == {"mean": 4.0, "std": 0.0}
    assert full["timings"][0]["speedup"]["mean"] == 1.0
    assert pruned["parameters"] < full["parameters"]
    assert full["checkpoint_bytes"] == open_model(checkpoints["full"]).total_bytes
    assert full["parameter_bytes"] == 4 * full["parameters"]


def test_checkpoints_take_turns_run_by_run(checkpoints, turns):
    payload = time_decoding(
        checkpoints, SENTENCES, PAIR, LatencyOptions(runs=2, memory=False, device="cpu")
    ).to_json()
    assert payload["interleaved"]
    labels = [label for label, _, _ in turns]
    assert labels == (["full"] * 3 + ["pruned"] * 3) * 3  # one of warm-up, two timed


def test_one_after_the_other_where_memory_is_short(checkpoints, turns, monkeypatch):
    monkeypatch.setattr(hardware, "MEMORY_SHARE", 0.0)
    assert not fit_together([open_model(path) for path in checkpoints.values()], CPU, torch.float32)
    payload = time_decoding(
        checkpoints, SENTENCES, PAIR, LatencyOptions(runs=2, memory=False, device="cpu")
    ).to_json()
    assert not payload["interleaved"]
    assert [label for label, _, _ in turns] == ["full"] * 9 + ["pruned"] * 9


def test_exactly_the_tokens_asked_for(checkpoints):
    model = load_model(checkpoints["full"], device="cpu")
    lengths = []
    generate = model.generate

    def watched(**settings):
        output = generate(**settings)
        lengths.append(output.shape[1] - 1)  # the first id starts the decoder
        return output

    model.generate = watched
    for beam in (1, 3):
        decode(model, [[5, 6, 2], [7, 2]], beam, 6, pad_id=1, forced_id=None)
    assert lengths == [6, 6]


def test_load_time_and_peak_memory_of_a_process_of_its_own(checkpoints):
    options = LatencyOptions(beams=(1,), runs=1, warm_up=0, new_tokens=2, threads=1, device="cpu")
    before = torch.get_num_threads()
    payload = time_decoding({"full": checkpoints["full"]}, SENTENCES, PAIR, options).to_json()
    assert payload["threads"] == 1
    assert torch.get_num_threads() == before
    result = payload["results"][0]
    assert result["load_s"] > 0
    assert result["resident_peak"] >= result["resident_before"] > 10**7
    assert result["device_peak"] is None


def test_a_process_that_fails_says_why(tmp_path):
    task = MemoryTask(str(tmp_path / "nothing"), "cpu", "auto", 1, [[5, 2]], 1, 2, 1, None)
    with pytest.raises(PruneError, match=r"could not be measured: .*nothing"):
        measure_cost(task)


def test_peak_resident_sees_what_is_allocated():
    before = peak_resident()
    block = bytearray(256 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_resident() >= min(before + 2**20, 256 * 2**20)


def test_spread_is_mean_and_sample_deviation():
    values = [1.0, 2.0, 4.0]
    assert Spread.of(values).to_json() == {
        "mean": pytest.approx(7 / 3),
        "std": pytest.approx(statistics.stdev(values), abs=1e-6),
    }
    assert Spread.of([3.0]).to_json() == {"mean": 3.0, "std": 0.0}


def test_more_tokens_than_positions_are_refused(checkpoints):
    with pytest.raises(UsageError, match="positions"):
        time_decoding(checkpoints, SENTENCES, PAIR, LatencyOptions(new_tokens=10**6))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("new_tokens", "left"), [(60, 4), (63, 1)])
def test_prompts_leave_room_for_what_a_decoder_alone_generates(tmp_path, family, new_tokens, left):
    path = tiny_family(tmp_path / "full", family)  # 64 positions
    with open_model(path) as opened:
        subject = module._subject("full", opened, ["the hen in the inn", "the ten hens"], PAIR, new_tokens)
    assert [len(ids) for ids in subject.sources] == [left, left]
    decode(load_model(path, device="cpu"), subject.sources, 1, new_tokens, 1, None)
    with pytest.raises(UsageError, match="64 new tokens were asked for, the model has 64 positions"):
        time_decoding({"full": path}, SENTENCES, PAIR, LatencyOptions(new_tokens=64))


def test_prompts_of_an_encoder_keep_their_positions(checkpoints):
    long = ["hen " * 20]
    with open_model(checkpoints["full"]) as opened:
        limit = opened.config["max_position_embeddings"]
        subject = module._subject("full", opened, long, PAIR, limit - 1)
    assert len(subject.sources[0]) > 1


def test_unknown_language(checkpoints):
    with pytest.raises(DataError, match="unknown language"):
        time_decoding(checkpoints, SENTENCES, ("eng_Latn", "zho_Hans"), OPTIONS)


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError):
        time_decoding({"x": Path(tmp_path)}, SENTENCES, PAIR, OPTIONS)
