"""`evaluate --task lm|mlm|classification`, and `--plot` for any task."""

import gzip

import pytest
from transformers import PhiConfig, PhiForCausalLM

from prunecli.commands.evaluate import evaluate
from prunecli.errors import DataError, UnsupportedModelError, UsageError
from tests.commands.calls import raising
from tests.families import tiny_family
from tests.pictures import drawn, pixels
from tests.results.tables import rows
from tests.tiny import VOCAB, json_of, tiny_nllb_moe, write_plain_tokenizer

CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate(("full", "small")):
        tiny_family(name, "gpt2", seed=seed)
        tiny_family(f"c-{name}", "bert", seed=seed, **CLASSIFIER)
    (tmp_path / "a.txt").write_text("the hat\nno\nten hens\n")
    (tmp_path / "b.txt").write_text("then\n")
    (tmp_path / "text.tsv").write_text("0\tthe hat\n1\tno\n2\tten hens\n")
    return tmp_path


def _run(*arguments):
    return raising(evaluate, *arguments, "--device", "cpu")


def test_perplexity(folder):
    result = _run("full", "small", "--task", "lm", "--text", "a.txt", "--text", "b.txt", "--lines")
    for text in ("perplexity", "bits/byte", "full", "small", "a.txt, b.txt, 4 texts"):
        assert text in result.stdout
    assert "paired t-test" not in result.stdout
    assert "*" not in result.stdout
    assert "Too few texts for a test of significance: 4;" in result.stderr
    assert "Text: 2 files, each line a text (--whole-files takes each file as one text)." in result.stderr
    assert "Written to evaluation.json." in result.stderr
    payload = json_of(folder / "evaluation.json")
    assert payload["task"] == "lm"
    assert [row["checkpoint"] for row in payload["results"]] == ["full", "small"]
    assert [(row["context"], row["stride"]) for row in payload["results"]] == [(64, 63)] * 2


def test_enough_texts_for_a_test(folder):
    (folder / "many.txt").write_text("the hat\nno\nten hens\n" * 10)
    result = _run("full", "small", "--text", "many.txt", "--lines")
    assert "(paired t-test)" in result.stdout
    assert "*" in result.stdout
    assert "too few" not in result.stderr
    result = _run("full", "small", "--text", "many.txt", "-o", "documents.json")
    assert "lm, many.txt, 1 document, 168 tokens\n" in result.stdout
    assert "Too few windows for a test of significance: 3;" in result.stderr
    assert "Text: 1 file as a whole document (--lines takes each line as a text)." in result.stderr
    result = _run("full", "small", "--text", "many.txt", "--context", "5", "-o", "windows.json")
    assert "(paired t-test over the windows' losses)" in result.stdout
    assert "*" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "task"),
    [
        (("full", "small", "--text", "a.txt.gz"), "lm"),
        (("masked", "--text", "a.txt.gz"), "mlm"),
        (("c-full", "c-small", "--labelled", "text.tsv.gz"), "classification"),
        (("undeclared", "--text", "a.txt.gz", "--context", "9"), "lm"),
    ],
)
def test_the_task_is_what_the_model_is_for(folder, arguments, task):
    """And text is read packed as it is unpacked, by every task."""
    tiny_family("masked", "bert")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    phi = PhiConfig(**shape, vocab_size=VOCAB, max_position_embeddings=32, pad_token_id=1)
    PhiForCausalLM(phi).save_pretrained("undeclared")
    write_plain_tokenizer(folder / "undeclared")
    for name in ("a.txt", "text.tsv"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
    _run(*arguments)
    found = json_of(folder / "evaluation.json")
    assert found["task"] == task
    if task == "lm":
        assert found["results"][0]["context"] == (9 if "undeclared" in arguments else 64)
    _run(*(argument.removesuffix(".gz") for argument in arguments), "--task", task, "-o", "plain.json")
    assert json_of(folder / "plain.json")["results"] == found["results"]


def test_texts_by_name_against_the_first(folder):
    texts = ("--text", "hats=a.txt", "--text", "b.txt", "--text", "hats=b.txt", "--continuations", "2")
    result = _run(
        "full", "small", *texts, "--table", "lm.csv", "--max-new-tokens", "4", "--max-sentences", "1"
    )
    for text in ("By text", "hats", "KL, nats", "same top-1", "same until", "same tokens"):
        assert text in result.stdout
    made = json_of(folder / "evaluation.json")
    assert made["data"]["texts"] == 2
    assert f"2 documents, {made['results'][0]['scores']['tokens']:,} tokens" in result.stdout
    assert sorted((one["text"], *one["outputs"]) for one in made["examples"]) == [
        (name, "full", "small") for name in ("b", "hats")
    ]
    assert "Where the outputs differ most" in result.stdout
    first, other = made["results"]
    assert list(first["by_text"]) == list(other["by_text"]) == ["hats", "b"]
    assert other["by_text"]["hats"]["continuations"] == 1
    table = rows("lm.csv", "by_text")
    assert [(row["checkpoint"], row["text"]) for row in table] == [
        (name, text) for name in ("full", "small") for text in ("hats", "b")
    ]
    assert table[2]["kl_divergence"] == other["by_text"]["hats"]["kl_divergence"]
    lines = result.stdout.splitlines()
    (shown,) = [line for line in lines if line.split()[:2] == ["hats", "small"]]
    assert f"{other['by_text']['hats']['kl_divergence']:.4f}" in shown


@pytest.mark.parametrize("task", ["classification", "translation"])
def test_a_plot(folder, monkeypatch, task):
    pytest.importorskip("altair")
    if task == "classification":
        text = ("c-full", "c-small", "--labelled", "text.tsv")
    else:
        monkeypatch.setenv("SACREBLEU", str(folder / "no-spm"))
        tiny_nllb_moe("moe")
        (folder / "data").mkdir()
        for language in ("eng_Latn", "fra_Latn"):
            (folder / "data" / f"test.{language}").write_text("the hat\n")
        pairs = ("--data", "data", "--pairs", "eng_Latn-fra_Latn")
        text = ("moe", *pairs, "--max-new-tokens", "2", "--beam", "1", "--bootstrap", "5")
    result = _run(*text, "--task", task, "--plot", "curve.png")
    pixels(folder / "curve.png")
    assert "evaluation.json and curve.png" in result.stderr


def test_steps_of_a_training_are_drawn_against_updates(folder, monkeypatch):
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
    _run("at-10", "at-20", "less-10", "less-20", "--text", "a.txt", "--plot", "curve.png")
    chart = written[0].specification(400)
    assert chart["layer"][0]["encoding"]["x"]["title"] == "updates"
    assert [row["x"] for row in drawn(chart, "line")] == [10, 20, 10, 20]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("full", "--task", "lm"), UsageError, "task lm needs text"),
        (
            ("c-full", "--text", "a.txt"),
            UsageError,
            "--text goes with --task mlm or lm or embedding, not classification",
        ),
        (("full", "c-full", "--text", "a.txt"), UsageError, "full is for lm, c-full for classification"),
        (("full", "--text", "a.txt", "--context", "65"), UsageError, "--context 65: the model has 64 pos"),
        (("bare", "--task", "mlm", "--text", "a.txt"), UnsupportedModelError, "BertModel, which has no head"),
        (("full", "--text", "a,b=a.txt"), UsageError, "--text a,b=a.txt: a comma in the name"),
        (("full", "--text", "a.txt", "--continuations", "3"), UsageError, "compares checkpoints"),
        (("full", "--text", "cut.txt.gz"), DataError, "cut.txt.gz: not a whole gzip file"),
        (("full", "--task", "mlm", "--text", "a.txt"), UnsupportedModelError, "It can do: lm"),
    ],
)
def test_refused(folder, arguments, error, message):
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"the hat\n" * 99)[:-9])
    tiny_family("bare", "bert", architectures=["BertModel"])
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(error) as caught:
        _run(*arguments)
    assert message in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_scores_by_class(folder):
    _run("c-full", "--labelled", "text.tsv", "--table", "c.csv")
    (result,) = json_of(folder / "evaluation.json")["results"]
    by_class = {row["class"]: row["f1"] for row in rows("c.csv", "f1_by_class")}
    assert by_class == result["scores"]["f1_by_class"]
