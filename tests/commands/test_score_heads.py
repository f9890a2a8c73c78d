import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from prunecli.architectures import FAMILIES
from prunecli.commands import console
from prunecli.commands.score_heads import score_heads
from prunecli.errors import UsageError
from prunecli.model.axes import module_of
from prunecli.model.parts import AttentionKind, AttentionLayer
from prunecli.results.unit_scores import head_table
from tests.commands.calls import call, done, raising, refused
from tests.commands.heads import kept
from tests.commands.heads import run as prune
from tests.families import tiny_family

PAIRS = ("--pairs", "eng_Latn-fra_Latn")
CLASSIFIER = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}


@pytest.fixture
def folder(tmp_path):
    tiny_family(tmp_path / "m", "m2m_100")
    (tmp_path / "data").mkdir()
    for split, lines in {"val": ("the hen", "a", "no hen on the hat"), "test": ("the inn", "ten")}.items():
        (tmp_path / f"data/{split}.eng_Latn").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / f"data/{split}.fra_Latn").write_text("".join(f"le {line}\n" for line in lines))
    (tmp_path / "text.txt").write_text("the hat\nno\nten hens\n")
    (tmp_path / "text.tsv").write_text("0\tthe hat\n1\tno\n2\tten hens\n")
    return tmp_path


def run(*arguments: object) -> Any:
    """One call of the command; its refusals are raised."""
    return raising(score_heads, *arguments, "--device", "cpu")


def scores(path: str = "heads.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def test_gradient(folder):
    result = run("m", "--data", "data", *PAIRS)
    assert "Importance (I_h of eq. 2, not normalised)" in result.stdout
    assert "Mean over 3 examples of translation." in result.stdout
    found = scores()
    assert found["format"] == "prunecli.scores/1"
    assert (found["method"], found["examples"], found["seed"]) == ("gradient", 3, None)
    assert [len(values) for values in found["values"].values()] == [4] * 7
    assert all(value > 0 for values in found["values"].values() for value in values)


def test_importance_per_token(folder):
    run("m", "--data", "data", *PAIRS, "-o", "example.json")
    result = run("m", "--data", "data", *PAIRS, "--importance", "token", "--memory", "2GiB")
    assert "Importance (I_h of eq. 2, per token, not normalised)" in result.stdout
    assert "Mean over the tokens of 3 examples of translation." in result.stdout
    found, other = scores(), scores("example.json")
    assert (found["per"], other["per"], found["examples"]) == ("token", "example", 3)
    assert {*other["counts"].values()} == {3}
    tokens = found["counts"]
    assert tokens.keys() == found["values"].keys()
    tokenizer = AutoTokenizer.from_pretrained(folder / "m", src_lang="eng_Latn")
    sources = sum(len(tokenizer(line)["input_ids"]) for line in ("the hen", "a", "no hen on the hat"))
    assert {tokens[name] for name in tokens if name.startswith("model.encoder")} == {sources}
    for name, values in other["values"].items():
        assert (np.array(found["values"][name]) >= np.array(values) * (1 - 1e-5)).all()
    assert prune("m", "--scores", "heads.json", "--ratio", 0.3, "-o", "pruned").status == 0
    mixed = prune("m", "--scores", "heads.json", "--scores", "example.json", "-o", "no")
    assert "heads.json and example.json cannot be merged: per is" in mixed.err


def test_ablation_by_beam_search(folder):
    """The heads of one layer on each side are soon ablated one by one while it translates."""
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    shallow = tiny_family("shallow", "m2m_100", **sizes)
    result = run(shallow, "--data", "data", *PAIRS, "--metric", "ablation", "--beam", 2, "--bootstrap", 10)
    assert "Change of chrF++ without the head" in result.stdout
    assert "chrF++ of the whole model" in result.stdout
    assert "Too few examples for a test of significance" in result.stderr
    assert "significantly" not in result.stdout
    found = scores()
    assert (found["metric"], found["seed"]) == ("chrf++", 12345)
    assert [one["metric"] for one in found["also"]] == ["bleu"]
    assert found["values"].keys() == found["p_values"].keys() == found["ids"].keys()


def test_enough_examples_for_a_test(folder):
    (folder / "many.txt").write_text("the hat\nno\nten hens\n" * 10)
    tiny_family(folder / "other", "gpt2")
    result = run("other", "--text", "many.txt", "--lines", "--metric", "ablation")
    assert "make it significantly worse" in result.stdout
    assert "too few" not in result.stderr
    result = run("other", "--text", "many.txt", "--lines", "--metric", "all-but-one", "-o", "one.json")
    assert "* differs from the whole model" in result.stdout


def test_all_but_one_chosen_on_one_split_reported_on_another(folder):
    common = ("m", "--data", "data", *PAIRS, "--metric", "all-but-one", "--measure", "loss")
    result = run(*common, "--split", "test", "--select-split", "val")
    assert "The best single head of each layer, chosen on other text" in result.stdout
    assert "Too few examples for a test of significance" in result.stderr
    assert "*" not in result.stdout
    found = scores()
    run(*common, "--split", "val", "-o", "val.json")
    run(*common, "--split", "test", "-o", "test.json")
    chosen, reported = scores("val.json"), scores("test.json")
    assert found["values"] == chosen["values"]
    for name, head in found["best"].items():
        assert head == int(np.argmin(chosen["values"][name]))  # a loss
        assert found["reported"]["only"][name] == pytest.approx(reported["values"][name][head], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "arguments", "task"),
    [
        ("bert", {}, ("--text", "text.txt"), "mlm"),
        ("bert", CLASSIFIER, ("--labelled", "text.tsv"), "classification"),
        ("bert", CLASSIFIER, ("--labelled", "text.tsv", "--metric", "ablation"), "classification"),
        ("llama", {}, ("--text", "text.txt", "--lines", "--metric", "all-but-one"), "lm"),
    ],
)
def test_tasks(folder, family, changes, arguments, task):
    tiny_family(folder / "other", family, **changes)
    run("other", *arguments, "--json")
    assert scores()["task"] == task
    assert scores()["examples"] == 3
    assert scores().get("whole_files") is (None if task == "classification" else False)


def test_scores_of_a_pruned_model_have_original_numbers(folder):
    run("m", "--data", "data", *PAIRS)
    assert prune("m", "--ratio", 0.3, "-o", "pruned").status == 0
    run("pruned", "--data", "data", *PAIRS, "-o", "again.json")
    ids = {module_of(name): tuple(ids) for name, ids in scores("again.json")["ids"].items()}
    assert ids == kept(folder / "pruned")
    assert prune("pruned", "--scores", "again.json", "--count", 1, "-o", "twice").status == 0
    # The original no longer fits scores made after a pruning.
    assert "again.json" in prune("m", "--scores", "again.json", "-o", "no").err


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("m", "--measure", "loss"), UsageError, "--measure goes with --metric ablation"),
        (
            ("m", "--metric", "ablation", "--importance", "token"),
            UsageError,
            "--importance goes with --metric",
        ),
        (
            ("m", "--metric", "ablation", "--measure", "accuracy", "--data", "data", *PAIRS),
            UsageError,
            "not one of translation",
        ),
        (("m", "--compute-dtype", "float16", "--data", "data", *PAIRS), UsageError, "small gradients vanish"),
    ],
)
def test_refusals(folder, arguments, error, message):
    with pytest.raises(error, match=message):
        run(*arguments)
    assert not Path("heads.json").exists()


def layer(kind: AttentionKind, number: int, heads: tuple[int, ...], original: int = 3) -> AttentionLayer:
    stack = FAMILIES["bart"].stacks[kind != "encoder"]
    name = f"{kind}.{number}"
    return AttentionLayer(
        name, kind, number, heads, original, original, {}, f"{name}.out", stack, stack.attentions[0], name
    )


LAYERS = (
    layer("encoder", 0, (0, 1, 2)),
    layer("encoder", 1, ()),
    layer("encoder", 2, (2, 0)),
    layer("cross", 0, (1,)),
)
VALUES = {"encoder.0": [1.0, 2.0, 3.0], "encoder.1": [], "encoder.2": [5.0, 4.0], "cross.0": [-1.0]}


def test_pruned_heads_have_no_value(capsys):
    console.show([head_table(VALUES, LAYERS, "Importance")])
    lines = capsys.readouterr().out.splitlines()
    title, columns, _, *rows = [line.split() for line in lines if line.strip()]
    assert title == ["Importance"]
    assert columns == ["attention", "layer", "head", "0", "1", "2"]
    assert rows == [
        ["encoder", "0", "1", "2", "3"],
        ["encoder", "1", "-", "-", "-"],
        ["encoder", "2", "4", "-", "5"],
        ["cross", "0", "-", "-1", "-"],
    ]


PAIR = ("--pairs", "eng_Latn-fra_Latn")
ALONE = ("--metric", "all-but-one", "--measure", "loss", "--device", "cpu")


@pytest.fixture
def text_folder(tmp_path):
    tiny_family(tmp_path / "translator", "m2m_100")
    tiny_family(tmp_path / "reader", "gpt2")
    classifier = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    tiny_family(tmp_path / "classifier", "bert", **classifier)
    for name, lines in {
        "a": ("the hat", "no", "ten hens"),
        "b": ("an inn on a tin", "the hen that hit"),
    }.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / f"{name}.fr").write_text("".join(f"le {line}\n" for line in lines))
        (tmp_path / f"{name}.tsv").write_text("".join(f"{i}\t{line}\n" for i, line in enumerate(lines)))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("reader", "--text", "a.txt", *PAIR), "--pairs goes with --task translation or embedding, not lm"),
        (
            (
                "translator",
                *ALONE,
                "--source-file",
                "a.txt",
                "--target-file",
                "a.fr",
                *PAIR,
                "--select-split",
                "b",
            ),
            "--select-split: the text has no splits",
        ),
        (("reader", *ALONE, "--text", "a.txt", "--select-data", "nothing.txt"), "nothing.txt"),
    ],
)
def test_text_refusals(text_folder, arguments, message):
    status = 1 if message == "nothing.txt" else 2
    refused(call(score_heads, *arguments), message, status)
    assert not (text_folder / "heads.json").exists()


def test_heads_chosen_on_another_file(text_folder):
    """The chosen heads are those that the other file alone gives; their scores are of the file at hand."""

    def scores(*arguments):
        done(score_heads, "classifier", *ALONE, "--labelled", *arguments, "--force")
        return json.loads((text_folder / "heads.json").read_text())

    both = scores("a.tsv", "--select-data", "b.tsv")
    reported, chosen = scores("a.tsv"), scores("b.tsv")
    assert both["values"] == chosen["values"] != reported["values"]
    for layer, head in both["best"].items():
        assert head == min(range(4), key=chosen["values"][layer].__getitem__)
        assert both["reported"]["only"][layer] == pytest.approx(reported["values"][layer][head], rel=1e-5)
