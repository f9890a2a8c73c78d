from contextvars import copy_context
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import CheckpointError, DataError, PruneError, StatisticsError
from prunecli.evaluation.scoring import spm_file
from prunecli.methods.experts.plan import read_experts
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import apply
from prunecli.processes import COMMAND
from prunecli.results.gates import GateStatistics, read_gates
from prunecli.results.unit_scores import read_scores
from prunecli.selection.cut import cut, read_kept
from prunecli.tensors.json_files import lenient, parsed, read_json, read_object
from prunecli.tensors.transaction import write_json
from prunecli.text.parallel import read_parallel
from prunecli.text.plain import read_labelled, read_plain
from prunecli.text.tokens import load_tokenizer
from tests.commands.calls import names
from tests.selections import kept_experts
from tests.tiny import json_of, tiny_nllb_moe

PATH = Path("a.json")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(payload=st.dictionaries(st.text(), VALUES, max_size=5))
def test_what_is_written_is_read(payload):
    write_json(PATH, payload, force=True)
    assert read_json(PATH) == json_of(PATH) == payload


@pytest.mark.parametrize("value", [float("nan"), {1, 2}], ids=str)
def test_what_has_no_form_in_json_is_not_written(value):
    with pytest.raises(PruneError, match=r"a\.json: not written"):
        write_json(PATH, {"a": [value]})
    assert names() == []


def test_a_failure_leaves_nothing_and_keeps_the_old(monkeypatch):
    write_json(PATH, {"a": 1})
    monkeypatch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_json(PATH, {"a": 2}, force=True)
    assert read_json(PATH) == {"a": 1}
    assert names() == ["a.json"]


def test_the_command_is_that_of_the_command_line_without_its_secrets():
    token = "hf_" + "a1B2" * 8
    words = ["prunecli", "evaluate", f"https://me:{token}@example.invalid/x", f"--x={token}", "-o", "a@b"]
    command = copy_context().run(lambda: (COMMAND.set(words), GateStatistics.header([], None))[1])
    assert command["command"] == [*words[:2], "https://***@example.invalid/x", "--x=***", "-o", "a@b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an empty file"),
        (" \n", "an empty file"),
        ('{"format": "prunecli.gates/1", "a": [1, 2', "cut short at line 1"),
        ('{"format": "prunecli.gat', "cut short"),
        ("{]}", "not JSON"),
        ('{"format": "prunecli.gates/1", "a": NaN}', "holds NaN"),
        ('{"format": "prunecli.gates/1", "a": -Infinity}', "holds -Infinity"),
        ("{}", "has no format"),
        ("[1, 2]", "has no format"),
        ('{"format": "prunecli.gates/1"}', 'has the format "prunecli.gates/1", this prunecli reads'),
        ('{"format": "prunecli.scores/2"}', "this prunecli reads"),
        ("[" * 100_000, ""),
    ],
)
def test_damaged_documents(text, says):
    PATH.write_text(text)
    with pytest.raises(StatisticsError, match=rf"^a\.json.*{says}"):
        read_scores(PATH)


DAMAGED = {
    "no JSON": b'{"a"',
    "no UTF-8": b'{"a": "\xff"}',
    "nested without end": b"[" * 100_000,
    "a number of thousands of digits": b'{"a": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": b'{"a": "\\uD800"}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_whatever_is_wrong_with_a_text_is_one_error(content):
    with pytest.raises(ValueError, match=r"."):
        parsed(content)
    PATH.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.json: "):
        read_object(PATH)


@pytest.mark.parametrize(
    "content", [*DAMAGED.values(), b"", b"[]", b"7", b"{}", b'{"a": 5}', b'{"a": NaN}', b'{"a": "x"}']
)
def test_what_is_read_leniently_is_none_where_it_is_damaged(content):
    count = lenient(lambda path: 1 // len(read_json(path)["a"]["b"]))
    assert count(PATH) is None
    for damaged in (content, b'{"a": {"b": []}}'):
        PATH.write_bytes(damaged)
        assert count(PATH) is None
    PATH.write_bytes(b'{"a": {"b": [0]}}')
    assert count(PATH) == 1
    assert count(Path()) is None


def test_no_key_twice():
    assert parsed('{"a": {"b": 1}, "b": ":"}', unique=True) == {"a": {"b": 1}, "b": ":"}
    for text in ('{"a": 1, "a": 1}', '{"a": {"b": 1, "b": 1}}', '{"a": [{"b": {}, "b": 1}]}'):
        with pytest.raises(ValueError, match="occurs twice"):
            parsed(text, unique=True)
        assert parsed(text)


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
        *(
            (name, lambda path: load_tokenizer(path.parent), CheckpointError)
            for name in ("tokenizer.json", "tokenizer_config.json", "sentencepiece.bpe.model")
        ),
    ],
)
def test_a_pointer_is_named(name, read, error):
    Path(name).write_text(POINTER)
    with pytest.raises(error, match=rf"{name}: a Git LFS pointer, not the file\n.*git lfs pull"):
        read(Path(name))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"]
)
def test_a_pointer_in_a_checkpoint_is_named(name):
    made = tiny_nllb_moe("tiny", shards=2)
    (made / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name}: a Git LFS pointer, not the file"):
        open_model(made)


def test_a_pointer_in_place_of_a_tokenizer_is_not_copied():
    made = tiny_nllb_moe("tiny")
    (made / "tokenizer.json").write_text(POINTER)
    source = open_model(made)
    reduced = cut(source, kept_experts({}))
    with pytest.raises(CheckpointError, match=r"tokenizer.json: a Git LFS pointer"):
        apply(source, reduced, "out")
    assert names() == ["tiny"]
