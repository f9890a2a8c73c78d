import json
from functools import partial
from unittest.mock import Mock

import pytest

from prunecli.commands.evaluate import evaluate
from prunecli.errors import DataError, OutputError, UsageError
from prunecli.evaluation import evaluate as module
from prunecli.results import read
from tests.commands.calls import call, raising
from tests.reference.group_means import differences_of
from tests.results.tables import rows
from tests.tiny import json_of, tiny_nllb_moe

TEXT = {"deu_Latn": "der hut\nnein\n", "eng_Latn": "the hat\nno\n", "fra_Latn": "le chapeau\nnon\n"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a checkpoint `full`, one like it that bears prunecli's mark, and text."""
    monkeypatch.setenv("SACREBLEU", str(tmp_path / "no-spm"))
    tiny_nllb_moe("full")
    history = [
        {
            "command": "prune-experts",
            "arguments": {"source": ["eng_Latn"], "target": ["deu_Latn", "fra_Latn"]},
        }
    ]
    mark = {"prunecli": {"version": 1, "experts": {}, "original_experts": {}, "history": history}}
    tiny_nllb_moe("pruned", seed=1, config=mark)
    (tmp_path / "data").mkdir()
    for language, lines in TEXT.items():
        (tmp_path / "data" / f"test.{language}").write_text(lines)
    return tmp_path


_run = partial(raising, evaluate)

QUICK = ("--max-new-tokens", "3", "--beam", "1", "--device", "cpu", "--bootstrap", "10")


def test_two_checkpoints_side_by_side(folder):
    result = _run("full", "pruned", "--data", "data", "--langs", "eng_Latn,fra_Latn,deu_Latn", *QUICK)
    assert result.exit_code == 0
    for text in ("chrF++", "over-gen.", "full", "pruned", "mean of 2 pairs", "eng_Latn-deu_Latn"):
        assert text in result.stdout
    assert "Too few sentences for a test of significance: 2; give 30 or more." in result.stderr
    assert "*" not in result.stdout
    assert "worse" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert "2 of 6 pairs" in result.stderr
    assert "--spm FILE" in result.stderr
    payload = json_of(folder / "evaluation.json")
    assert payload["pairs"] == ["eng_Latn-fra_Latn", "eng_Latn-deu_Latn"]


def test_an_early_end_says_that_the_same_command_goes_on(folder, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(module, "score", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            evaluate(
                checkpoints=[folder / "full"],
                data=folder / "data",
                pairs="eng_Latn-deu_Latn",
                beam=1,
                max_new_tokens=3,
            )
    assert "the same command resumes" in capsys.readouterr().err
    assert not (folder / "evaluation.json").exists()
    result = _run(
        "full", "--data", "data", "--pairs", "eng_Latn-deu_Latn", "--beam", "1", "--max-new-tokens", "3"
    )
    assert "Resuming from" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["data", "evaluation.json", "full", "pruned"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("full", "--data", "data", "--memory", "8GiB"), UsageError, "--memory goes with --task mlm or lm"),
        (("full", "--source-file", "data/test.eng_Latn"), UsageError, "go together"),
        (("full", "--data", "data", "--seed", "0"), UsageError, "seed 0"),
        (("full", "--data", "data", "--min-ratio", "0.9"), UsageError, "one was given"),
        (("full", "--data", "data", "--max", "perplexity=9"), UsageError, "no score of translation"),
        (
            ("full", "--data", "data", "--compute-dtype", "int4"),
            UsageError,
            "Choose auto, int8, float32|int4: no such type",
        ),
    ],
)
def test_refused(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        _run(*arguments)
    assert not (folder / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("arguments", "missed"),
    [
        (("--min", "chrF++=100", "--max", "over_generated=1"), ["full: chrf++", "pruned: chrf++"]),
        (("--min-ratio", "0", "--min", "length_ratio=0"), []),
    ],
)
def test_a_score_below_its_limit_ends_with_status_1(folder, arguments, missed):
    command = ("full", "pruned", "--data", "data", "--pairs", "eng_Latn-deu_Latn", *QUICK, *arguments)
    ended = call(evaluate, *map(str, command))
    assert ended.status == bool(missed)
    lines = ended.err.splitlines()[-len(missed) :] if missed else []
    assert [start in line for start, line in zip(missed, lines, strict=True)] == [True] * len(missed)
    assert len(json_of(folder / "evaluation.json")["examples"]) == 2
    assert "Where the outputs differ most" in ended.out


def test_without_a_checkpoint_less_of_the_demo_s_text_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("prunecli.commands.evaluate.ABOUT_A_MINUTE", 30)
    bare = ("--pairs", "qba_Latn-qka_Latn,qka_Latn-qba_Latn", "--beam", "1", "--bootstrap", "0")
    result = _run(*bare)
    assert "1 checkpoint x 1 of 2 pairs x 30 of 200 sentences (--all: all)." in result.stderr
    assert json_of(tmp_path / "evaluation.json")["data"]["sentences"] == 30
    for arguments in (("--all",), ("--max-sentences", "200")):
        monkeypatch.setattr("prunecli.evaluation.evaluate._at_most", None)  # not called
        monkeypatch.setattr("prunecli.evaluation.evaluate.evaluate", lambda *_, **__: None)
        assert "(--all" not in _run(*bare, *arguments, "--force").stderr


CLASSES = "fra_Latn\thigh\neng_Latn\thigh\ndeu_Latn\tmiddle\n"
ALL = ("--data", "data", "--pairs", ",".join(f"{a}-{b}" for a in TEXT for b in TEXT if a != b))


def test_means_by_group(folder):
    (folder / "classes.tsv").write_text(CLASSES)
    result = _run("full", "pruned", *ALL, "--groups", "classes.tsv", "--table", "t.csv", *QUICK)
    assert "Means by group of languages" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    payload = json_of(folder / "evaluation.json")
    assert payload["groups"] == {"fra_Latn": "high", "eng_Latn": "high", "deu_Latn": "middle"}
    groups = {"high": {"fra_Latn", "eng_Latn"}, "middle": {"deu_Latn"}}
    for made in payload["results"]:
        assert [(mean["source"], mean["target"], mean["pairs"]) for mean in made["by_group"]] == [
            ("high", "high", 2), ("high", "middle", 2), ("middle", "high", 2),
        ]  # fmt: skip
    full, pruned = payload["results"]
    table, mean = rows("t.csv", "by_group")[3], pruned["by_group"][0]
    assert (table["checkpoint"], table["source_group"], table["bleu"]) == ("pruned", "high", mean["bleu"])
    assert table["chrf++_difference_lowest"] == mean["difference"]["chrf++"]["lowest"]
    for mean in (*pruned["by_group"], {**pruned["mean"], "source": None}):
        of = (groups[mean["source"]], groups[mean["target"]]) if mean["source"] else (set(TEXT), set(TEXT))
        right = differences_of(full["pairs"], pruned["pairs"], "chrf++", *of)
        assert mean["difference"]["chrf++"] == pytest.approx(right, abs=2e-4)
        assert f"{right['lowest']:+.1f}" in result.stdout
    assert "difference" not in full["mean"]
    assert "difference from full over the pairs" in result.stdout


def test_the_level_of_significance(folder):
    for language, lines in TEXT.items():
        (folder / "data" / f"test.{language}").write_text(lines * 15)
    arguments = ("full", "pruned", *ALL, "--significance", "0.5", *QUICK)
    assert "with p < 0.5 (paired bootstrap" in _run(*arguments).stdout
    payload = json_of(folder / "evaluation.json")
    full, pruned = payload["results"]
    assert payload["significance"]["level"] == 0.5
    below = [
        scores["chrf++"] - full["pairs"][pair]["chrf++"]
        for pair, scores in pruned["pairs"].items()
        if scores["bootstrap"]["chrf++"]["p_value"] < 0.5
    ]
    counts = {"worse": sum(one < 0 for one in below), "better": sum(one > 0 for one in below)}
    assert pruned["mean"]["significant"]["chrf++"] == counts
    with pytest.raises(UsageError, match="--significance 1: must be less than 1"):
        _run(*arguments[:-2], "--force", "--significance", "1")


def test_the_table_has_the_json_s_values(folder):
    result = _run("full", "pruned", *ALL, "--table", "t.csv", "--json", *QUICK)
    payload = json.loads(result.stdout)
    assert "groups" not in payload
    pairs = {(row["checkpoint"], f"{row['source']}-{row['target']}"): row for row in rows("t.csv", "pairs")}
    for made in payload["results"]:
        for pair, scores in made["pairs"].items():
            row = pairs.pop((made["checkpoint"], pair))
            assert [row[name] for name in ("chrf++", "bleu")] == [scores["chrf++"], scores["bleu"]]
            assert row.get("chrf++_p_value") == scores["bootstrap"]["chrf++"].get("p_value")
        for side in ("source", "target"):
            means = [row for row in rows("t.csv", f"by_{side}") if row["checkpoint"] == made["checkpoint"]]
            assert {row[side]: row["bleu"] for row in means} == {
                language: mean["bleu"] for language, mean in made[f"by_{side}"].items()
            }
    assert not pairs
    assert read("evaluation.json").frame("mean")["parameters"].tolist() == [
        made["parameters"] for made in payload["results"]
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--table", "t.txt"), UsageError, "written as CSV, Markdown or LaTeX"),
        (("--table", "old.csv"), OutputError, "old.csv: exists already"),
        (("--table", "t.csv", "--output", "t.csv"), UsageError, "the result is written there"),
        (("--plot", "a.pdf"), UsageError, "unknown kind of file"),
        (("--groups", "few.tsv"), DataError, "few.tsv: no group for deu_Latn, fra_Latn"),
    ],
)
def test_tables_and_groups_are_refused_before_the_work(folder, monkeypatch, arguments, error, message):
    (folder / "old.csv").write_text("mine")
    (folder / "few.tsv").write_text("eng_Latn\thigh\n")
    monkeypatch.setattr("prunecli.evaluation.evaluate.translate", None)
    with pytest.raises(error, match=message):
        _run("full", *ALL, *arguments, *QUICK)
    assert (folder / "old.csv").read_text() == "mine"
    assert not (folder / "evaluation.json").exists()
