"""Git LFS pointers are called by their name, whatever they stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prunecli.errors import CheckpointError, DataError, PruneError, StatisticsError
from prunecli.evaluation.scoring import spm_file
from prunecli.methods.experts.plan import read_experts
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import apply
from prunecli.results.gates import read_gates
from prunecli.results.unit_scores import read_scores
from prunecli.selection.cut import cut
from prunecli.selection.selection import read_kept
from prunecli.tensors.json_files import refuse_pointer
from prunecli.text.parallel import read_parallel
from prunecli.text.plain import read_labelled, read_plain
from prunecli.text.tokens import load_tokenizer
from tests.selections import kept_experts
from tests.tiny import tiny_nllb_moe

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:203314cc96001ad3\nsize 66067895\n"


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        ("stats-202.json", read_gates, StatisticsError),
        ("experts.json", lambda path: read_experts(path, ()), StatisticsError),
        ("heads.json", read_scores, StatisticsError),
        ("kept.json", lambda path: read_kept(path, ()), StatisticsError),
        ("text", lambda path: read_plain([path]), DataError),
        ("labelled.tsv", read_labelled, DataError),
        ("val.eng_Latn", lambda path: read_parallel(path.parent, "val"), DataError),
        ("flores.model", spm_file, DataError),
    ],
)
def test_a_pointer_is_named(
    name: str, read: Callable[[Path], object], error: type[PruneError], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(error, match=rf"{name}: a Git LFS pointer, not the file") as caught:
        read(tmp_path / name)
    assert "git lfs pull" in str(caught.value.remedy)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_nllb_moe(tmp_path_factory.mktemp("model") / "tiny", shards=2)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"]
)
def test_a_pointer_in_a_checkpoint_is_named(sharded: Path, name: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    shutil.copytree(sharded, made)
    (made / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}: a Git LFS pointer, not the file"):
        open_model(made)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "sentencepiece.bpe.model"])
def test_a_pointer_in_place_of_a_tokenizer_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}: a Git LFS pointer"):
        load_tokenizer(tmp_path)


def test_a_pointer_in_place_of_a_tokenizer_is_not_copied(tmp_path: Path) -> None:
    made = tiny_nllb_moe(tmp_path / "tiny")
    (made / "tokenizer.json").write_text(POINTER)
    with open_model(made) as source:
        reduced = cut(source, kept_experts({}))
        with pytest.raises(CheckpointError, match=r"tokenizer.json: a Git LFS pointer"):
            apply(source, reduced, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickled_pointer_is_named(tmp_path: Path) -> None:
    made = tiny_nllb_moe(tmp_path / "tiny")
    (made / "model.safetensors").unlink()
    (made / "pytorch_model.bin").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: a Git LFS pointer"):
        open_model(made)


def test_text_about_pointers_is_none(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(POINTER + "A longer text that begins like one.\n" * 40)
    refuse_pointer(path)
    refuse_pointer(tmp_path / "absent")
    refuse_pointer(tmp_path)
