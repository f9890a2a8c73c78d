from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from prunecli.commands.measure import score_heads
from prunecli.model.axes import module_of
from tests.commands.calls import call, done, refusals
from tests.commands.heads import kept
from tests.commands.heads import run as prune
from tests.families import tiny_family
from tests.tiny import json_of, write_files

PAIRS = "--pairs eng_Latn-fra_Latn"


@pytest.fixture(autouse=True)
def _model_and_text():
    tiny_family("m", "m2m_100")
    for split, lines in {"val": "the hen\na\nno hen on the hat\n", "test": "the inn\nten\n"}.items():
        french = "".join(f"le {line}\n" for line in lines.splitlines())
        write_files("data", {f"{split}.eng_Latn": lines, f"{split}.fra_Latn": french})
    write_files(".", {"text.txt": "the hat\nno\nten hens\n", "text.tsv": "0\tthe hat\n1\tno\n2\tten hens\n"})


run = partial(done, score_heads, "--device cpu")


def scores(path: str = "heads.json") -> dict[str, Any]:
    return json_of(path)


def test_importance_per_token():
    run("m --data data", PAIRS, "-o example.json").shows(
        "Importance (I_h of eq. 2, not normalised)", "Mean over 3 examples of translation."
    )
    run("m --data data", PAIRS, "--importance token --memory 2GiB").shows(
        "Importance (I_h of eq. 2, per token, not normalised)",
        "Mean over the tokens of 3 examples of translation.",
    )
    found, other = scores(), scores("example.json")
    assert (found["per"], other["per"], found["examples"]) == ("token", "example", 3)
    assert (other["format"], other["method"], other["seed"]) == ("prunecli.scores/1", "gradient", None)
    assert [len(values) for values in other["values"].values()] == [4] * 7
    assert all(value > 0 for values in other["values"].values() for value in values)
    assert {*other["counts"].values()} == {3}
    tokens = found["counts"]
    assert tokens.keys() == found["values"].keys()
    tokenizer = AutoTokenizer.from_pretrained("m", src_lang="eng_Latn")
    sources = sum(len(tokenizer(line)["input_ids"]) for line in ("the hen", "a", "no hen on the hat"))
    assert {tokens[name] for name in tokens if name.startswith("model.encoder")} == {sources}
    for name, values in other["values"].items():
        assert (np.array(found["values"][name]) >= np.array(values) * (1 - 1e-5)).all()
    assert prune("m --scores heads.json --ratio 0.3 -o pruned").status == 0
    prune("m --scores heads.json --scores example.json -o no").says(
        "heads.json and example.json cannot be merged: per is"
    )


def test_ablation_by_beam_search():
    """The heads of one layer on each side are soon ablated one by one while it translates."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    shallow = tiny_family("shallow", "m2m_100", **sizes)
    result = run(shallow, "--data data", PAIRS, "--metric ablation --beam 2 --bootstrap 10")
    result.shows("Change of chrF++ without the head", "chrF++ of the whole model")
    assert "Too few examples for a test of significance" in result.err
    assert "significantly" not in result.out
    found = scores()
    assert (found["metric"], found["seed"]) == ("chrf++", 12345)
    assert [one["metric"] for one in found["also"]] == ["bleu"]
    assert found["values"].keys() == found["p_values"].keys() == found["ids"].keys()


def test_enough_examples_for_a_test():
    Path("many.txt").write_text("the hat\nno\nten hens\n" * 10)
    tiny_family("other", "gpt2")
    result = run("other --text many.txt --lines --metric ablation")
    assert "make it significantly worse" in result.out
    assert "too few" not in result.err
    result = run("other --text many.txt --lines --metric all-but-one -o one.json")
    assert "* differs from the whole model" in result.out


@pytest.mark.parametrize(
    ("arguments", "chosen", "reported"),
    [
        (f"m --data data {PAIRS}", "--split val", "--split test"),
        ("reader --labelled", "more.tsv", "text.tsv"),
    ],
)
def test_all_but_one_chosen_on_one_text_reported_on_another(arguments, chosen, reported):
    tiny_family("reader", "bert-classifier")
    Path("more.tsv").write_text("0\tan inn on a tin\n1\tthe hen that hit\n")
    common = "--metric all-but-one --measure loss"
    option = "--select-split" if "--data" in arguments else "--select-data"
    result = run(arguments, reported, common, option, chosen.split()[-1])
    assert "The best single head of each layer, chosen on other text" in result.out
    assert "Too few examples for a test of significance" in result.err
    assert "*" not in result.out
    run(arguments, chosen, common, "-o chosen.json")
    run(arguments, reported, common, "-o reported.json")
    found, known, others = scores(), scores("chosen.json"), scores("reported.json")
    assert found["values"] == known["values"] != others["values"]
    for name, head in found["best"].items():
        assert head == int(np.argmin(known["values"][name]))  # a loss
        assert found["reported"]["only"][name] == pytest.approx(others["values"][name][head], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "arguments", "task"),
    [
        ("bert", "--text text.txt", "mlm"),
        ("bert-classifier", "--labelled text.tsv", "classification"),
        ("bert-classifier", "--labelled text.tsv --metric ablation", "classification"),
        ("llama", "--text text.txt --lines --metric all-but-one", "lm"),
    ],
)
def test_tasks(family, arguments, task):
    tiny_family("other", family)
    run("other", arguments, "--json")
    assert scores()["task"] == task
    assert scores()["examples"] == 3
    assert scores().get("whole_files") is (None if task == "classification" else False)


def test_scores_of_a_pruned_model_have_original_numbers():
    run("m --data data", PAIRS)
    assert prune("m --ratio 0.3 -o pruned").status == 0
    shown = run("pruned --data data", PAIRS, "-o again.json").out
    ids = {module_of(name): tuple(ids) for name, ids in scores("again.json")["ids"].items()}
    assert ids == kept("pruned")
    table = [line.split() for line in shown.splitlines() if line.split()[1:2] in (["0"], ["1"], ["2"])]
    dashes = [[cell == "-" for cell in cells] for _, _, *cells in table]
    assert dashes == [[head not in own for head in range(4)] for own in ids.values()]
    assert prune("pruned --scores again.json --count 1 -o twice").status == 0
    # The original no longer fits scores made after a pruning.
    assert "again.json" in prune("m --scores again.json -o no").err


ALONE = "--metric all-but-one --measure"
FILES = f"{ALONE} loss --source-file text.txt --target-file text.tsv {PAIRS}"


@refusals(
    (f"--data data {PAIRS} {ALONE} accuracy", "not one of translation"),
    (f"--data data {PAIRS} --compute-dtype float16", "small gradients vanish"),
    (f"{FILES} --select-split b", "--select-split: the text has no splits"),
    (f"{FILES} --select-data nothing.txt", "nothing.txt", 1),
    (f"--task lm --text text.txt {PAIRS}", "--pairs goes with --task"),
)
def test_refusals(refusal):
    refusal(call, score_heads, "m")
    assert not Path("heads.json").exists()
