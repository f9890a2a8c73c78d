from pathlib import Path

import pytest

from prunecli.commands.evaluate import bench_latency
from tests.commands.calls import both, refusals, refused
from tests.families import tiny_family
from tests.pictures import pixels
from tests.results.tables import rows
from tests.tiny import json_of, tiny_nllb_moe, write_files


@pytest.fixture(autouse=True)
def _models_and_text():
    tiny_nllb_moe("full")
    tiny_nllb_moe("pruned", experts=4)
    write_files("data", {"test.eng_Latn": "the hat\nno\na hen\nin\n", "test.fra_Latn": "a\nb\nc\nd\n"})


run, done = both(bench_latency, "--runs=2 --no-memory --device=cpu")


QUICK = "--data=data --max-new-tokens=2 --warmup=0"


def test_speed_over_batch_sizes_is_drawn():
    arguments = "--batch-size 1,2 --beam 1 --sentences 2 --plot speed.png"
    assert "Written to latency.json and speed.png." in done("full pruned", QUICK, arguments).err
    pixels("speed.png")


def test_noisy_speeds_are_named(monkeypatch):
    seconds = iter([1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 1.0, 2.0, 1.0])

    monkeypatch.setattr("prunecli.evaluation.workloads.Decoding.run", lambda *_: {None: next(seconds)})
    done("full pruned", QUICK, "--sentences 1 --runs 5").shows(
        "Noisy, more than 20% from run to run: full, pruned.", "--runs 11."
    )


@refusals(
    (f"full {QUICK} --beam 1,x", "--beam x"),
    (f"full {QUICK} --sentences 9", "sentences were asked for", 1),
    (f"full {QUICK} -o data/test.eng_Latn", "exists", 1),
)
def test_refused(refusal):
    refusal(run)
    assert not Path("latency.json").exists()


def test_a_model_that_generates_nothing_is_refused():
    tiny_family("encoder", "bert")
    refused(run("encoder", QUICK, "--sentences 2"), "ForMaskedLM, which has no head for it", 1)
    refused(run("encoder"), "task mlm needs text")


def test_examples_per_second_of_a_classifier():
    tiny_family("bert", "bert-classifier")
    Path("dev.tsv").write_text("0\tthe hat\n1\tno\n0\ta hen\n1\tin\n")
    result = done("bert --labelled dev.tsv --sentences 2 --batch-size 1,2 --table t.csv")
    result.shows("2 examples of dev.tsv", "examples/s")
    assert "beam" not in result.out
    payload = json_of("latency.json")
    assert (payload["task"], payload["data"]["files"]) == ("classification", ["dev.tsv"])
    timings = payload["results"][0]["timings"]
    table = rows("t.csv", "speed")
    medians = [timing["examples_per_second"]["median"] for timing in timings]
    assert [row["examples_per_second_median"] for row in table] == medians


def test_prefill_and_decode_of_a_language_model():
    tiny_family("llama", "llama")
    Path("lines.txt").write_text("the hat is on the hen\n" * 4)
    done("llama --task lm --text lines.txt --context 4 --sentences 2 --max-new-tokens 3").shows(
        "2 prompts of lines.txt, 4 tokens each, 3 new tokens each",
        "prefill",
        "decode",
        "tokens/s",
        "s/prompt",
    )
    refused(run("llama --text lines.txt --beam 2 --force"), "--beam goes with --task translation")
