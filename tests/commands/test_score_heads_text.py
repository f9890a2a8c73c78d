"""The text of `prunecli score-heads`: what does not go with a task is refused, and what heads are chosen on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prunecli.commands.score_heads import score_heads
from tests.commands.calls import call, refused
from tests.families import tiny_family

PAIR = ("--pairs", "eng_Latn-fra_Latn")
ALONE = ("--metric", "all-but-one", "--measure", "loss", "--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_family(tmp_path / "translator", "m2m_100")
    tiny_family(tmp_path / "reader", "gpt2")
    classifier: dict[str, Any] = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
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
        (("reader", "--text", "a.txt", *PAIR), "--pairs goes with --task translation, not lm"),
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
def test_refusals(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    status = 1 if message == "nothing.txt" else 2
    refused(call(score_heads, *arguments), message, status)
    assert not (folder / "heads.json").exists()


@pytest.mark.parametrize(("model", "option", "ending"), [("classifier", "--labelled", "tsv")])
def test_heads_chosen_on_another_file(folder: Path, model: str, option: str, ending: str) -> None:
    """The chosen heads are those that the other file alone gives; their scores are of the file at hand."""

    def scores(*arguments: str) -> dict[str, Any]:
        result = call(score_heads, model, *ALONE, *arguments, "--force")
        assert result.status == 0, result.err
        found: dict[str, Any] = json.loads((folder / "heads.json").read_text())
        return found

    both = scores(option, f"a.{ending}", "--select-data", f"b.{ending}")
    reported, chosen = scores(option, f"a.{ending}"), scores(option, f"b.{ending}")
    assert both["values"] == chosen["values"] != reported["values"]
    for layer, head in both["best"].items():
        assert head == min(range(4), key=chosen["values"][layer].__getitem__)
        assert both["reported"]["only"][layer] == pytest.approx(reported["values"][layer][head], rel=1e-5)
