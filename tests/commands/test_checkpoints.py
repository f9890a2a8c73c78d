"""The checkpoints that are taken where none is named, in a working directory that holds other things too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from prunecli import demo
from prunecli.commands.checkpoints import checkpoint_or_demo, checkpoints_or_demo, demo_text, texts_or_demo
from prunecli.model.checkpoint import open_model
from prunecli.text.files import TextFile
from tests.tiny import write_json


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def checkpoint(path: Path, config: Any) -> Path:
    path.mkdir()
    write_json(path / "config.json", config)
    return path


def pruned(path: Path, original: Path = demo.CHECKPOINT) -> Path:
    source = {"path": "x", "fingerprint": open_model(original).fingerprint}
    return checkpoint(path, {"prunecli": {"history": [{"source": source}, {"source": {"fingerprint": "y"}}]}})


def test_nothing_given_is_the_demo_and_what_was_pruned_here(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoints_or_demo(None) == [demo.CHECKPOINT]
    assert capsys.readouterr().err == "No checkpoint given: using the bundled demo model.\n"
    pruned(folder / "b")
    pruned(folder / "a")
    checkpoint(folder / "mine", {"prunecli": {"history": [{"source": {"fingerprint": "y"}}]}})
    checkpoint(folder / "stock", {"model_type": "bert"})
    checkpoint(folder / "list", ["prunecli"])
    (folder / "damaged").mkdir()
    (folder / "damaged/config.json").write_bytes(b"\xff{")
    assert checkpoints_or_demo([]) == [demo.CHECKPOINT, Path("a"), Path("b")]
    assert "using the bundled demo model with a, b." in capsys.readouterr().err
    assert checkpoints_or_demo([Path("stock")]) == [Path("stock")]
    assert capsys.readouterr().err == ""


def test_the_language_model_stands_beside_language_models_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pruned(folder / "a", demo.LM_CHECKPOINT)
    pruned(folder / "b")
    assert checkpoints_or_demo(None, "lm") == [demo.LM_CHECKPOINT, Path("a")]
    assert capsys.readouterr().err == "No checkpoint given: using the bundled language model with a.\n"
    assert checkpoints_or_demo(None) == [demo.CHECKPOINT, Path("b")]
    assert checkpoint_or_demo(None, "lm") == demo.LM_CHECKPOINT
    assert checkpoint_or_demo(Path("a"), "lm") == Path("a")


def test_the_text_of_the_language_model_is_taken_where_none_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = (TextFile(Path("x")),)
    assert texts_or_demo(own, "lm", "val", None) == own
    assert texts_or_demo(None, "translation", "val", None) == ()
    assert capsys.readouterr().err == ""
    taken = texts_or_demo(None, "lm", "val", None)
    assert taken == tuple(TextFile(demo.LM_DATA / f"val.{name}", name) for name in demo.LM_TEXTS)
    assert "No `files` given: using the demo's text, prose and code" in capsys.readouterr().err


def test_the_text_of_a_demo_is_for_its_model_and_those_made_from_it_alone(folder: Path) -> None:
    shutil.copytree(demo.CHECKPOINT, folder / "copy")
    mine = checkpoint(folder / "mine", {"prunecli": {"history": [{"source": {"fingerprint": "y"}}]}})
    made, lm = pruned(folder / "made"), pruned(folder / "lm", demo.LM_CHECKPOINT)
    for named in (None, [], demo.CHECKPOINT, folder / "copy", [made, demo.CHECKPOINT]):
        assert demo_text(named) == demo.DATA
    for named in (mine, [made, mine], lm, demo.LM_CHECKPOINT, Path("org/name"), folder / "nothing"):
        assert demo_text(named) is None
    assert demo_text([lm], "lm") == demo.LM_DATA
    assert texts_or_demo(None, "lm", "val", [lm]) == texts_or_demo(None, "lm", "val", None)
    assert texts_or_demo(None, "lm", "val", [mine]) == ()
