from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer

from prunecli.errors import DataError, PruneError, UsageError
from prunecli.evaluation import latency, workloads
from prunecli.evaluation.latency import LatencyOptions, bench_latency, measure_cost, run_task
from prunecli.evaluation.workloads import decode
from prunecli.model.checkpoint import open_model
from prunecli.text.choice import TextChoice
from tests.families import tiny_family
from tests.opening import load
from tests.sentence_model import sentence_model
from tests.tiny import tiny_nllb_moe

SENTENCES = ("the hat", "a hen in the inn", "no", "the ten hens")
PAIR = ("eng_Latn", "fra_Latn")
TURNS = LatencyOptions(sentences=4, runs=2, device="cpu", memory=False)
OPTIONS = TURNS.updated(beams=(1, 2), batch_sizes=(1, 2), new_tokens=4)
QUICK = TURNS.updated(batch_sizes=(1, 4), warm_up=0)
FULL = {"full": "full"}


@pytest.fixture(scope="module")
def checkpoints(shared_path):
    return {n: tiny_nllb_moe(shared_path / n, experts=e) for n, e in {"full": 8, "pruned": 4}.items()}


@pytest.fixture
def sentences():
    """English sentences, whose translations are not read."""
    for name in ("source", "target"):
        Path(name).write_text("".join(f"{line}\n" for line in SENTENCES))
    return TextChoice(source_file="source", target_file="target", pairs="eng_Latn-fra_Latn")


@pytest.fixture
def turns(monkeypatch):
    """Which checkpoint decoded which batch, in order."""
    seen = []
    real = workloads.Workload.load

    def load(work, path, *rest):
        loaded = real(work, path, *rest)
        loaded.label = path.name
        return loaded

    def run(work, model, beam):
        seen.append((model.label, len(work), beam))
        return {None: {"full": 2.0, "pruned": 0.5}[model.label] * len(work)}

    monkeypatch.setattr(workloads.Workload, "load", load)
    monkeypatch.setattr(workloads.Decoding, "run", run)
    return seen


def test_one_slow_run_does_not_make_a_speed_up(checkpoints, sentences, turns, monkeypatch):
    spent = {"full": [4.0, 4.0, 4.2, 40.0, 4.1, 3.9], "pruned": [2.0] * 6}  # the first warms up
    monkeypatch.setattr(workloads.Decoding, "run", lambda _, model, __: {None: spent[model.label].pop(0)})
    options = TURNS.updated(runs=5, sentences=1)
    _, pruned = bench_latency(checkpoints, sentences, options).results
    # Run by run 2, 2.1, 20, 2.05, 1.95: the median is 2.05; from it they are 0.05, 0.05, 17.95, 0, 0.1: again 0.05.
    assert pruned.timings[0].speedup.median == pytest.approx(2.05)
    assert pruned.timings[0].speedup.deviation == pytest.approx(1.4826 * 0.05, abs=1e-5)


def test_results_by_hand(checkpoints, sentences, turns):
    payload = bench_latency(checkpoints, sentences, OPTIONS).to_json()
    assert payload["format"] == "prunecli.latency/1"
    assert (payload["sentences"], payload["new_tokens"], payload["pair"]) == (4, 4, "eng_Latn-fra_Latn")
    assert payload["threads"] == 1  # the models are small
    full, pruned = payload["results"]
    configs = [(timing["batch_size"], timing["beam"]) for timing in full["timings"]]
    assert configs == [(1, 1), (1, 2), (2, 1), (2, 2)]
    # 4 sentences x 2 s; 4 x 4 tokens in 8 s
    assert full["timings"][0]["seconds"] == [8.0, 8.0]
    steady = {"deviation": 0.0, "std": 0.0}
    assert full["timings"][0]["tokens_per_second"] == {"median": 2.0, "mean": 2.0, **steady}
    assert pruned["timings"][0]["seconds_per_sentence"] == {"median": 0.5, "mean": 0.5, **steady}
    assert pruned["timings"][0]["speedup"] == {"median": 4.0, "mean": 4.0, **steady}
    assert full["timings"][0]["speedup"]["median"] == 1.0
    assert pruned["parameters"] < full["parameters"]
    assert full["checkpoint_bytes"] == open_model(checkpoints["full"]).total_bytes
    assert full["parameter_bytes"] == 4 * full["parameters"]


@pytest.mark.parametrize("is_short", [False, True])
def test_checkpoints_take_turns_run_by_run_where_memory_holds_both(
    checkpoints, sentences, turns, monkeypatch, is_short
):
    if is_short:
        monkeypatch.setattr(latency, "MEMORY_SHARE", 0.0)
    payload = bench_latency(checkpoints, sentences, TURNS).to_json()
    assert payload["interleaved"] != is_short
    labels = [label for label, _, _ in turns]  # one of warm-up, two timed
    assert labels == (["full"] * 12 + ["pruned"] * 12 if is_short else (["full"] * 4 + ["pruned"] * 4) * 3)


@pytest.mark.parametrize("ends", [2, [2, 9]])
def test_an_end_is_held_back_as_transformers_does_it(checkpoints, ends):
    model = load(next(iter(checkpoints.values())))
    model.generation_config.eos_token_id = ends
    with torch.no_grad():  # whose most likely token is the end
        model.lm_head.weight[2] *= 5
    rows = [[5, 6, 7, 2], [8, 9, 7, 2]]
    want = model.generate(
        torch.tensor(rows), num_beams=3, do_sample=False, max_new_tokens=6, min_new_tokens=6
    )
    assert decode(model, rows, 3, 6, pad_id=1) == want.tolist()


def test_a_process_that_fails_says_why():
    work = workloads.Decoding([[5, 2]], 1, 2)
    task = {"checkpoint": "nothing", "device": "cpu", "dtype": "auto", "threads": 1}
    with pytest.raises(PruneError, match=r"could not be measured: .*nothing"):
        measure_cost(**task, work=work, beam=1)


@pytest.mark.parametrize(
    ("idle", "small", "threads", "said"),
    [
        (4.0, True, 1, []),
        (4.0, False, 3, []),
        (1.6, False, 2, ["2 threads instead of 3"]),
        (0.2, False, 1, ["1 t"]),
    ],
)
def test_threads_by_the_model_s_size_and_the_idle_cores(checkpoints, monkeypatch, idle, small, threads, said):
    """Four cores of six, no two of which are idle alike."""
    busy = [100 - 25 * share * idle / 4 for share in (4.0, 0, 3.9, 0, 4.1, 4.0)]
    monkeypatch.setattr(latency, "SMALL", 10**9 if small else 0)
    monkeypatch.setattr(latency.os, "sched_getaffinity", lambda _process: {0, 2, 4, 5}, raising=False)
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds, percpu: busy)
    heard = []
    with latency.threads(3), open_model(checkpoints["full"]) as opened:
        assert latency.idle_threads([opened], heard.append) == threads
    assert [text in line for text, line in zip(said, heard, strict=True)] == [True] * len(said)


LINES = ("the hen in the inn", "a hat", "no", "the ten hens")
LABELLED = "0\tthe hen in the inn\ta hat\n1\tno\tthe inn\n0\ta hen\tno\n1\tthe hat\tno\n"


@pytest.fixture
def text():
    Path("lines.txt").write_text("".join(f"{line}\n" for line in LINES))
    return TextChoice(files=("lines.txt",), whole_files=False)


@pytest.fixture
def labelled():
    Path("pairs.tsv").write_text(LABELLED)
    return TextChoice(labelled="pairs.tsv")


class Clocked:
    """A model whose passes take a second for each token that they read, padding included; `passes` has their sizes."""

    def __init__(self, monkeypatch):
        self.now, self.passes = 0.0, []
        monkeypatch.setattr(workloads.time, "perf_counter", lambda: self.now)
        real = workloads.Workload.load

        def load(*given):
            loaded = real(*given)
            loaded.register_forward_pre_hook(self.passed, with_kwargs=True)
            return loaded

        monkeypatch.setattr(workloads.Workload, "load", load)

    def passed(self, _model, _arguments, inputs):
        ids = inputs["input_ids"]
        self.passes.append((tuple(ids.shape), inputs.get("attention_mask")))
        self.now += ids.numel()


def test_prefill_and_decode_are_told_apart(text, monkeypatch):
    """1905.10650 has no such table; by hand: a second for each token of a pass."""
    clocked = Clocked(monkeypatch)
    tiny_family("full", "llama")
    found = bench_latency(FULL, text, QUICK.updated(new_tokens=3))
    lengths = [len(row) for row in AutoTokenizer.from_pretrained("full")(list(LINES))["input_ids"]]
    one, batched = clocked.passes[:16], clocked.passes[32:36]
    # A prompt alone: its tokens at once, then 3 passes of one token each.
    assert [shape for shape, _ in one[:4]] == [(1, lengths[0]), (1, 1), (1, 1), (1, 1)]
    # Four at once: shorter prompts are padded before they begin.
    assert [shape for shape, _ in batched] == [(4, max(lengths)), (4, 1), (4, 1), (4, 1)]
    assert batched[0][1].tolist() == [[0] * (max(lengths) - length) + [1] * length for length in lengths]
    timings = {(row.batch_size, row.phase): row for row in found.results[0].timings}
    assert list(timings) == [(1, "prefill"), (1, "decode"), (4, "prefill"), (4, "decode")]
    assert timings[1, "prefill"].seconds == [sum(lengths)] * 2
    assert timings[1, "decode"].seconds == [3 * 4] * 2
    assert timings[4, "prefill"].tokens_per_second.median == pytest.approx(
        sum(lengths) / (4 * max(lengths)), abs=1e-6
    )
    assert found.described == "4 prompts of lines.txt, 3 new tokens each"
    assert "beam" not in timings[1, "decode"].to_json()


def test_prompts_of_one_length_are_cut_out_of_lines_and_documents(text, monkeypatch):
    clocked = Clocked(monkeypatch)
    monkeypatch.setattr(workloads, "PROMPT", 9)
    tiny_family("full", "gpt2")
    options = QUICK.updated(sentences=2, batch_sizes=(2,), runs=1, new_tokens=2)
    bench_latency(FULL, text.updated(context=5), options)
    assert clocked.passes[0][0] == (2, 5)
    with pytest.raises(DataError, match="prompts of 30 tokens, 2 are needed"):
        bench_latency(FULL, text.updated(context=30), options)
    with pytest.raises(UsageError, match="prompts of 60 tokens and 5 new ones"):
        bench_latency(FULL, text.updated(context=60), options.updated(new_tokens=4))
    with pytest.raises(UsageError, match="64 new tokens"):
        bench_latency(FULL, text, options.updated(new_tokens=63))
    clocked.passes.clear()
    found = bench_latency(FULL, text.updated(whole_files=None), options)
    assert clocked.passes[0][0] == (2, 9)
    assert found.data["whole_files"] is True
    with pytest.raises(DataError, match="4 prompts of 9 tokens, 8 are needed"):
        bench_latency(FULL, text.updated(whole_files=True), options.updated(sentences=8))


def test_examples_of_a_classifier(labelled, monkeypatch):
    """Table 4 of 1905.10650: examples per second over batch sizes; by hand: a second for each token of a pass."""
    clocked = Clocked(monkeypatch)
    tiny_family("full", "bert", architectures=["BertForSequenceClassification"])
    found = bench_latency(FULL, labelled, QUICK)
    pairs = [line.split("\t")[1:] for line in LABELLED.splitlines()]
    rows = AutoTokenizer.from_pretrained("full")([a for a, _ in pairs], [b for _, b in pairs])["input_ids"]
    lengths = [len(row) for row in rows]
    assert [shape for shape, _ in clocked.passes] == [(1, n) for n in lengths] * 2 + [(4, max(lengths))] * 2
    _, four = found.results[0].timings
    assert four.examples_per_second.median == pytest.approx(1 / max(lengths), abs=1e-6)
    assert four.tokens_per_second.median == pytest.approx(sum(lengths) / (4 * max(lengths)), abs=1e-6)
    assert (found.pair, found.new_tokens) == (None, None)


@pytest.mark.parametrize("task", ["mlm", "embedding"])
def test_load_time_and_peak_memory_of_a_process_of_its_own(text, monkeypatch, task):
    sentence_model("full") if task == "embedding" else tiny_family("full", "roberta")
    if task == "mlm":  # what the other's own process does
        monkeypatch.setattr(latency, "measure_cost", run_task)
    before = torch.get_num_threads()
    options = QUICK.updated(sentences=2, batch_sizes=(2,), runs=1, memory=True, threads=1)
    payload = bench_latency(FULL, text, options).to_json()
    assert payload["task"] == task
    assert payload["data"]["files"] == ["lines.txt"]
    assert payload["threads"] == 1
    assert torch.get_num_threads() == before
    result = payload["results"][0]
    assert result["timings"][0]["examples_per_second"]["mean"] > 0
    assert result["load_s"] > 0
    assert result["resident_peak"] >= result["resident_before"] > 10**7
    assert result["device_peak"] is None


@pytest.mark.parametrize(
    ("family", "task", "more", "message"),
    [
        ("llama", "mlm", {}, "mlm: the model is a LlamaForCausalLM"),
        ("roberta", "lm", {}, "lm: the model is a RobertaForMaskedLM"),
        ("llama", "lm", {"sentences": 9}, "12 texts were asked for"),
    ],
)
def test_text_and_models_that_do_not_go_together(text, family, task, more, message):
    tiny_family("full", family)
    with pytest.raises(PruneError, match=message):
        bench_latency(FULL, text, QUICK.updated(**more), task=task)


def test_a_classifier_without_padding_takes_one_at_a_time(labelled):
    tiny_family("full", "gpt2", architectures=["GPT2ForSequenceClassification"], pad_token_id=None)
    with pytest.raises(UsageError, match="no padding token"):
        bench_latency(FULL, labelled, QUICK)
