import gzip
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import PhiConfig, PhiForCausalLM

from prunecli.commands.evaluate import evaluate
from prunecli.evaluation import evaluate as module
from prunecli.results import read
from tests.commands.calls import both, names, refusals, refused
from tests.families import tiny_family
from tests.pictures import drawn, pixels
from tests.reference.scoring import differences_of
from tests.results.tables import rows
from tests.tiny import VOCAB, json_of, tiny_nllb_moe, write_files, write_plain_tokenizer

TEXT = {"deu_Latn": "der hut\nnein\n", "eng_Latn": "the hat\nno\n", "fra_Latn": "le chapeau\nnon\n"}


@pytest.fixture
def folder(monkeypatch):
    """A working directory with a checkpoint `full`, one like it that bears prunecli's mark, and text."""
    monkeypatch.setenv("SACREBLEU", "no-spm")
    tiny_nllb_moe("full")
    arguments = {"source": ["eng_Latn"], "target": ["deu_Latn", "fra_Latn"]}
    history = [{"command": "prune-experts", "arguments": arguments}]
    mark = {"prunecli": {"version": 1, "experts": {}, "original_experts": {}, "history": history}}
    tiny_nllb_moe("pruned", seed=1, config=mark)
    write_files("data", {f"test.{language}": lines for language, lines in TEXT.items()})


run, done = both(evaluate, "--device cpu")

QUICK = "--max-new-tokens 3 --beam 1 --bootstrap 10"


def test_two_checkpoints_side_by_side(folder):
    result = done("full pruned --data data --langs eng_Latn,fra_Latn,deu_Latn", QUICK)
    result.shows("chrF++", "over-gen.", "full", "pruned", "mean of 2 pairs", "eng_Latn-deu_Latn")
    assert "Too few sentences for a test of significance: 2; give 30 or more." in result.err
    assert "*" not in result.out
    assert "worse" not in result.out
    assert max(map(len, result.out.splitlines())) <= 120
    result.says("2 of 6 pairs", "--spm FILE")
    assert json_of("evaluation.json")["pairs"] == ["eng_Latn-fra_Latn", "eng_Latn-deu_Latn"]


def test_an_early_end_says_that_the_same_command_goes_on(folder, monkeypatch):
    command = f"full --data data --pairs eng_Latn-deu_Latn {QUICK}"
    with monkeypatch.context() as patch:
        patch.setattr(module, "score", Mock(side_effect=KeyboardInterrupt))
        assert "the same command resumes" in run(command).err
    assert not Path("evaluation.json").exists()
    assert "Resuming from" in done(command).err
    assert names() == ["data", "evaluation.json", "full", "pruned"]


@refusals(
    ("full --data data --memory 8GiB", "--memory goes with --task mlm or lm"),
    ("full --task lm --text data/test.eng_Latn --beam 2", "--beam goes with "),
    ("full --source-file data/test.eng_Latn", "go together"),
    ("full --data data --seed 0", "seed 0"),
    ("full --data data --min-ratio 0.9", "one was given"),
    ("full --data data --max perplexity=9", "no score of translation"),
    ("full --data data --compute-dtype int4", "Choose auto, int8, float32"),
)
def test_refused(refusal, folder):
    refusal(run)
    assert not Path("evaluation.json").exists()


@pytest.mark.parametrize(
    ("arguments", "missed"),
    [
        ("--min chrF++=100 --max over_generated=1", ["full: chrf++", "pruned: chrf++"]),
        ("--min-ratio 0 --min length_ratio=0", []),
    ],
)
def test_a_score_below_its_limit_ends_with_status_1(folder, arguments, missed):
    ended = run("full pruned --data data --pairs eng_Latn-deu_Latn", QUICK, arguments)
    assert ended.status == bool(missed)
    lines = ended.err.splitlines()[-len(missed) :] if missed else []
    assert [start in line for start, line in zip(missed, lines, strict=True)] == [True] * len(missed)
    assert len(json_of("evaluation.json")["examples"]) == 2
    assert "Where the outputs differ most" in ended.out


def test_without_a_checkpoint_less_of_the_demo_s_text_is_taken():
    assert "30 sentences of each pair" in done("--pairs qba_Latn-qka_Latn --beam 1 --bootstrap 0").err
    assert json_of("evaluation.json")["data"]["sentences"] == 30


ALL = f"--data data --pairs {','.join(f'{a}-{b}' for a in TEXT for b in TEXT if a != b)}"


def test_means_by_group(folder):
    Path("classes.tsv").write_text("fra_Latn\thigh\neng_Latn\thigh\ndeu_Latn\tmiddle\n")
    result = done("full pruned", ALL, "--groups classes.tsv --table t.csv", QUICK)
    assert "Means by group of languages" in result.out
    assert max(map(len, result.out.splitlines())) <= 120
    payload = json_of("evaluation.json")
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
        assert f"{right['lowest']:+.1f}" in result.out
    assert "difference" not in full["mean"]
    assert "difference from full over the pairs" in result.out


def test_the_level_of_significance(folder):
    write_files("data", {f"test.{language}": lines * 15 for language, lines in TEXT.items()})
    arguments = f"full pruned {ALL} --significance 0.5 {QUICK}"
    assert "with p < 0.5 (paired bootstrap" in done(arguments).out
    payload = json_of("evaluation.json")
    full, pruned = payload["results"]
    assert payload["significance"]["level"] == 0.5
    differ = [pair for pair, own in pruned["pairs"].items() if own["bootstrap"]["chrf++"]["p_value"] < 0.5]
    below = [pruned["pairs"][pair]["chrf++"] - full["pairs"][pair]["chrf++"] for pair in differ]
    counts = {"worse": sum(one < 0 for one in below), "better": sum(one > 0 for one in below)}
    assert pruned["mean"]["significant"]["chrf++"] == counts
    refused(run(arguments, "--force --significance 1"), "--significance 1: must be less than 1")


def test_the_table_has_the_json_s_values(folder):
    payload = done("full pruned", ALL, "--table t.csv --json", QUICK).json
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


@refusals(
    ("--table t.txt", "written as CSV, Markdown or LaTeX"),
    ("--table old.csv", "old.csv: exists already", 1),
    ("--table t.csv --output t.csv", "the result is written there"),
    ("--plot a.pdf", "unknown kind of file"),
    ("--groups few.tsv", "few.tsv: no group for deu_Latn, fra_Latn", 1),
)
def test_tables_and_groups_are_refused_before_the_work(refusal, folder, monkeypatch):
    Path("old.csv").write_text("mine")
    Path("few.tsv").write_text("eng_Latn\thigh\n")
    monkeypatch.setattr("prunecli.evaluation.evaluate.translate", None)
    refusal(run, "full", ALL, QUICK)
    assert Path("old.csv").read_text() == "mine"
    assert not Path("evaluation.json").exists()


# `evaluate --task lm|mlm|classification`, and `--plot` for any task.


@pytest.fixture
def task_folder():
    for seed, name in enumerate(("full", "small")):
        tiny_family(name, "gpt2", seed=seed)
        tiny_family(f"c-{name}", "bert-classifier", seed=seed)
    Path("a.txt").write_text("the hat\nno\nten hens\n")
    Path("b.txt").write_text("then\n")
    Path("text.tsv").write_text("0\tthe hat\n1\tno\n2\tten hens\n")


def test_perplexity(task_folder):
    result = done("full small --task lm --text a.txt --text b.txt --lines")
    result.shows("perplexity", "bits/byte", "full", "small", "a.txt, b.txt, 4 texts")
    assert "paired t-test" not in result.out
    assert "*" not in result.out
    result.says(
        "Too few texts for a test of significance: 4;",
        "Text: 2 files, each line a text (--whole-files takes each file as one text).",
        "Written to evaluation.json.",
    )
    payload = json_of("evaluation.json")
    assert payload["task"] == "lm"
    assert [row["checkpoint"] for row in payload["results"]] == ["full", "small"]
    assert [(row["context"], row["stride"]) for row in payload["results"]] == [(64, 63)] * 2


def test_enough_texts_for_a_test(task_folder):
    Path("many.txt").write_text("the hat\nno\nten hens\n" * 10)
    result = done("full small --text many.txt --lines")
    result.shows("(paired t-test)", "*")
    assert "too few" not in result.err
    result = done("full small --text many.txt -o documents.json")
    assert "lm, many.txt, 1 document, 168 tokens\n" in result.out
    result.says(
        "Too few windows for a test of significance: 3;",
        "Text: 1 file as a whole document (--lines takes each line as a text).",
    )
    result = done("full small --text many.txt --context 5 -o windows.json")
    result.shows("(paired t-test over the windows' losses)", "*")


@pytest.mark.parametrize(
    ("arguments", "task"),
    [
        ("full small --text a.txt.gz", "lm"),
        ("masked --text all=a.txt.gz", "mlm"),
        ("c-full c-small --labelled text.tsv.gz", "classification"),
        ("undeclared --text a.txt.gz --context 9", "lm"),
    ],
)
def test_the_task_is_what_the_model_is_for(task_folder, arguments, task):
    """And text is read packed as it is unpacked, by every task."""
    tiny_family("masked", "bert")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    phi = PhiConfig(**shape, vocab_size=VOCAB, max_position_embeddings=32, pad_token_id=1)
    PhiForCausalLM(phi).save_pretrained("undeclared")
    write_plain_tokenizer("undeclared")
    for name in ("a.txt", "text.tsv"):
        Path(f"{name}.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    done(arguments)
    found = json_of("evaluation.json")
    assert found["task"] == task
    if task == "lm":
        assert found["results"][0]["context"] == (9 if "undeclared" in arguments else 64)
    if task == "mlm":
        assert found["results"][0]["by_text"] == {"all": found["results"][0]["scores"]}
    done(arguments.replace(".gz", ""), f"--task {task} -o plain.json")
    assert json_of("plain.json")["results"] == found["results"]


def test_texts_by_name_against_the_first(task_folder):
    texts = "--text hats=a.txt --text b.txt --text hats=b.txt --continuations 2"
    result = done("full small", texts, "--table lm.csv --max-new-tokens 4 --max-sentences 1")
    result.shows("By text", "hats", "KL, nats", "same top-1", "same until", "same tokens")
    made = json_of("evaluation.json")
    assert made["data"]["texts"] == 2
    assert f"2 documents, {made['results'][0]['scores']['tokens']:,} tokens" in result.out
    assert sorted((one["text"], *one["outputs"]) for one in made["examples"]) == [
        (name, "full", "small") for name in ("b", "hats")
    ]
    assert "Where the outputs differ most" in result.out
    first, other = made["results"]
    assert list(first["by_text"]) == list(other["by_text"]) == ["hats", "b"]
    assert other["by_text"]["hats"]["continuations"] == 1
    table = rows("lm.csv", "by_text")
    assert [(row["checkpoint"], row["text"]) for row in table] == [
        (name, text) for name in ("full", "small") for text in ("hats", "b")
    ]
    assert table[2]["kl_divergence"] == other["by_text"]["hats"]["kl_divergence"]
    lines = result.out.splitlines()
    (shown,) = [line for line in lines if line.split()[:2] == ["hats", "small"]]
    assert f"{other['by_text']['hats']['kl_divergence']:.4f}" in shown


@pytest.mark.parametrize("task", ["classification", "translation"])
def test_a_plot(task_folder, monkeypatch, task):
    pytest.importorskip("altair")
    if task == "classification":
        text = "c-full c-small --labelled text.tsv"
    else:
        monkeypatch.setenv("SACREBLEU", str(Path("no-spm").resolve()))
        tiny_nllb_moe("moe")
        write_files("data", dict.fromkeys(("test.eng_Latn", "test.fra_Latn"), "the hat\n"))
        text = "moe --data data --pairs eng_Latn-fra_Latn --max-new-tokens 2 --beam 1 --bootstrap 5"
    result = done(text, f"--task {task} --plot curve.png")
    pixels("curve.png")
    assert "evaluation.json and curve.png" in result.err


def test_steps_of_a_training_are_drawn_against_updates(task_folder, monkeypatch):
    pytest.importorskip("altair")
    written = []
    monkeypatch.setattr(
        "prunecli.report.render.save_pictures", lambda pictures, *_: written.extend(pictures[0])
    )
    for steps in (10, 20):
        trained = {"command": "finetune", "arguments": {"steps": steps}}
        history = [trained, {"command": "prune-ffn", "arguments": {"width": 8}}]
        tiny_family(f"at-{steps}", "gpt2", prunecli={"version": 1, "history": history[:1]})
        tiny_family(f"less-{steps}", "gpt2", n_inner=8, prunecli={"version": 1, "history": history})
    done("at-10 at-20 less-10 less-20 --text a.txt --plot curve.png")
    chart = written[0].specification(400)
    assert chart["layer"][0]["encoding"]["x"]["title"] == "updates"
    assert [row["x"] for row in drawn(chart, "line")] == [10, 20, 10, 20]


@refusals(
    ("full --task lm", "task lm needs text"),
    ("c-full --text a.txt", "embedding, not classification"),
    ("full c-full --text a.txt", "full is for lm, c-full for classification"),
    ("full --text a.txt --context 65", "--context 65: the model has 64 pos"),
    ("bare --task mlm --text a.txt", "BertModel, which has no head", 1),
    ("full --text a,b=a.txt", "--text a,b=a.txt: a comma in the name"),
    ("full --text a.txt --continuations 3", "compares checkpoints"),
    ("full --text cut.txt.gz", "cut.txt.gz: not a whole gzip file", 1),
    ("full --task mlm --text a.txt", "It can do: lm", 1),
)
def test_tasks_are_refused(refusal, task_folder):
    Path("cut.txt.gz").write_bytes(gzip.compress(b"the hat\n" * 99)[:-9])
    tiny_family("bare", "bert", architectures=["BertModel"])
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    refusal(run)
    assert {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()} == before


def test_scores_by_class(task_folder):
    done("c-full --labelled text.tsv --table c.csv")
    (result,) = json_of("evaluation.json")["results"]
    by_class = {row["class"]: row["f1"] for row in rows("c.csv", "f1_by_class")}
    assert by_class == result["scores"]["f1_by_class"]
