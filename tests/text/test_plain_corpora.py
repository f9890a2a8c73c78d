"""Named texts: which documents there are, and their tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from prunecli.errors import DataError, UsageError
from prunecli.text.files import CHARACTERS, TextFile
from prunecli.text.plain import Corpus, read_corpora, token_rows
from prunecli.text.tokens import load_tokenizer
from tests.tiny import write_plain_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}.{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    write_plain_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def write(path: Path, *rows: object) -> Path:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def test_files_of_one_name_are_one_text(tmp_path: Path) -> None:
    files = [
        TextFile(write(tmp_path / "a.txt", "one", "", "two"), "code"),
        TextFile(write(tmp_path / "prose.txt", "three")),
        TextFile(write(tmp_path / "b.jsonl.gz", {"text": "four\nlines"}), "code"),
    ]
    said = list[str]()
    code, prose = read_corpora(files, whole_files=False, say=said.append)
    assert said == ["Text: 2 files, each line a text (`whole_files` takes each file as one text)."]
    assert (code.name, code.documents) == ("code", ("one", "two", "four\nlines"))
    assert code.files == (files[0].path, files[2].path)
    assert (prose.name, prose.documents) == ("prose", ("three",))


def test_whole_files_are_documents_and_json_lines_stay_lines(tmp_path: Path) -> None:
    plain, rows = (
        write(tmp_path / "a.py", "if x:", "    y"),
        write(tmp_path / "a.ndjson", {"text": "p"}, {"text": "q"}),
    )
    files = [TextFile(plain, "a"), TextFile(rows, "a")]
    corpus = read_corpora(files)[0]
    assert (corpus.documents, corpus.whole_files) == (("if x:\n    y", "p", "q"), True)
    plain.write_text("a" * 100)
    assert read_corpora(files, max_tokens=2)[0].documents == ("a" * 2 * CHARACTERS, "p", "q")


def test_an_object_in_plain_text_is_text(tmp_path: Path) -> None:
    corpus = read_corpora([TextFile(write(tmp_path / "data.txt", {"text": "a"}))])[0]
    assert corpus.documents == ('{"text": "a"}',)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ({"content": "a"}, 'line 2: neither a "text" nor a chat'),
        ({"messages": []}, "line 2: neither"),
        ({"messages": [{"content": "a"}]}, "line 2: neither"),
        ({"text": "a", "messages": [{"role": "user", "content": "a"}]}, "line 2: neither"),
        ([1], "line 2: neither"),
        ('{"text": "\\ud800"}', "line 2: not JSON .holds text that no file could"),
    ],
)
def test_rows_that_are_neither_are_named(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"text": "fine"}, row)
    with pytest.raises(DataError, match=message):
        read_corpora([TextFile(path)])


def test_no_file_is_refused() -> None:
    with pytest.raises(UsageError, match="no text"):
        read_corpora([])


def test_rows_are_what_the_tokenizer_makes(tokenizer: Any, tmp_path: Path) -> None:
    texts = [f"the hen {number}" for number in range(600)]
    rows = list(token_rows(tokenizer, Corpus("a", (tmp_path,), tuple(texts))))
    assert rows == [tokenizer(text)["input_ids"] for text in texts]


def test_chats_go_through_the_template_and_nothing_is_added(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = TEMPLATE
    chat = ({"role": "user", "content": "the hen"}, {"role": "assistant", "content": "a hat"})
    rows = list(token_rows(tokenizer, Corpus("a", (tmp_path,), ("the tin", chat, "a"))))
    expected = tokenizer("user the hen.assistant a hat.", add_special_tokens=False)["input_ids"]
    assert rows == [tokenizer("the tin")["input_ids"], expected, tokenizer("a")["input_ids"]]


def test_a_chat_needs_a_template(tokenizer: Any) -> None:
    corpus = Corpus("a", (Path("chats.jsonl"),), ("a", ({"role": "user", "content": "hen"},)))
    with pytest.raises(DataError, match=r"chats\.jsonl: chat 2: the model's tokenizer has no chat template"):
        list(token_rows(tokenizer, corpus))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        list(token_rows(tokenizer, corpus))


def test_a_template_reaches_nothing_of_python(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "made"
    tokenizer.chat_template = f"{{{{ cycler.__init__.__globals__.os.system('touch {file}') }}}}"
    with pytest.raises(DataError, match="unsafe"):
        list(token_rows(tokenizer, Corpus("a", (), (({"role": "user", "content": "hen"},),))))
    assert not file.exists()


def test_the_hash_knows_texts_from_chats_and_their_order() -> None:
    chat = ({"role": "user", "content": "a"},)
    documents: list[tuple[Any, ...]] = [("a", "b"), ("b", "a"), ("a\nb",), (chat,), (json.dumps(chat),)]
    assert len({Corpus("x", (), found).sha256 for found in documents}) == len(documents)
