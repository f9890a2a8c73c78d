"""What commands find by themselves, in a working directory that holds other things too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prunecli import demo
from prunecli.commands.found import checkpoints_or_found, chosen_text, prunecli_checkpoints, pruned_pairs
from prunecli.errors import UsageError
from tests.tiny import write_json

ENGLISH, FRENCH, GERMAN = "eng_Latn", "fra_Latn", "deu_Latn"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checkpoint(path: Path, config: Any) -> Path:
    path.mkdir()
    write_json(path / "config.json", config)
    return path


def pruned(path: Path, *arguments: Any) -> Path:
    return checkpoint(path, {"prunecli": {"history": [{"arguments": each} for each in arguments]}})


def test_nothing_given_is_the_demo_and_what_was_pruned_here(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoints_or_found(None) == [demo.CHECKPOINT]
    assert capsys.readouterr().err == "No checkpoint given: using the bundled demo model.\n"
    pruned(folder / "b")
    pruned(folder / "a")
    checkpoint(folder / "stock", {"model_type": "bert"})
    checkpoint(folder / "list", ["prunecli"])
    (folder / "damaged").mkdir()
    (folder / "damaged/config.json").write_bytes(b"\xff{")
    assert checkpoints_or_found([]) == [demo.CHECKPOINT, Path("a"), Path("b")]
    assert "using the bundled demo model with a, b." in capsys.readouterr().err
    assert checkpoints_or_found([Path("stock")]) == [Path("stock")]
    assert capsys.readouterr().err == ""


def test_pairs_of_a_checkpoint_are_those_it_was_pruned_for(folder: Path) -> None:
    pairs = [(a, b) for a in (ENGLISH, FRENCH, GERMAN) for b in (ENGLISH, FRENCH, GERMAN) if a != b]
    as_text = pruned(folder / "text", {"source": f"{ENGLISH}, {FRENCH}", "target": GERMAN})
    as_list = pruned(folder / "list", {"source": [ENGLISH, FRENCH], "target": [GERMAN]})
    wanted = [(ENGLISH, GERMAN), (FRENCH, GERMAN)]
    assert pruned_pairs([as_text], pairs) == pruned_pairs([as_list], pairs) == wanted
    twice = pruned(
        folder / "twice", {"source": ENGLISH}, {"ratio": 0.2}, "damaged", {"source": 1, "target": [GERMAN]}
    )
    assert pruned_pairs([as_text, twice], pairs) == [(ENGLISH, GERMAN)]


@pytest.mark.parametrize("history", [None, "much", {"arguments": 1}, ["prune-experts", None]])
def test_a_damaged_history_prunes_for_nothing(folder: Path, history: Any) -> None:
    path = checkpoint(folder / "a", {"prunecli": {"history": history}})
    assert prunecli_checkpoints(folder) == [path]
    assert pruned_pairs([path], [(ENGLISH, FRENCH)]) == [(ENGLISH, FRENCH)]
    other = checkpoint(folder / "b", {"prunecli": history})
    assert pruned_pairs([other], [(ENGLISH, FRENCH)]) == [(ENGLISH, FRENCH)]


def test_the_demos_text_is_said_with_its_languages(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_text(None, "val", None, None, "qba_Latn-qbo_Latn", None)[1] == (("qba_Latn", "qbo_Latn"),)
    assert capsys.readouterr().err == (
        "No --data given: using the demo's text, in qba_Latn, qbo_Latn, qka_Latn, qko_Latn, qna_Latn, qno_Latn; "
        "give yours with --data.\n"
    )


def test_a_file_of_one_language_needs_the_other_and_the_pair(folder: Path) -> None:
    source, target, pair = Path("a.en"), Path("a.fr"), f"{ENGLISH}-{FRENCH}"
    for files in ((source, None, pair), (None, target, pair), (source, target, None)):
        with pytest.raises(UsageError, match="go together"):
            chosen_text(None, "val", *files, None)
    for data, langs in ((Path("data"), None), (None, f"{ENGLISH},{FRENCH}")):
        with pytest.raises(UsageError, match="--source-file does not go with --data or --langs"):
            chosen_text(data, "val", source, target, pair, langs)
    source.write_text("the hen\n")
    target.write_text("la poule\n")
    assert chosen_text(None, "val", source, target, pair, None)[1] == ((ENGLISH, FRENCH),)
