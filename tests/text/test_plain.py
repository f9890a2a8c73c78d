import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.errors import DataError
from prunecli.text.files import CHARACTERS, TextFile
from prunecli.text.plain import (
    Corpus,
    LabelledText,
    label_ids,
    read_corpora,
    read_labelled,
    read_plain,
    token_rows,
)
from prunecli.text.tokens import load_tokenizer
from tests.text.files import written
from tests.tiny import write_plain_tokenizer


def test_each_line_is_a_text_and_blank_lines_are_none():
    first = written("a.txt", b"\xef\xbb\xbfThe hat.\r\n\r\n  \t\r\n No.\r\n")
    second = written("b.txt", "une\u2028ligne\nlast")
    text = read_plain([first, second])
    assert text.texts == ("The hat.", " No.", "une\u2028ligne", "last")
    assert text.files == (first, second)
    assert len(text) == 4


def test_whole_files_keep_their_lines_but_no_mark_and_no_blank_lines_at_their_ends():
    paths = [
        written("a.txt", b"\xef\xbb\xbf\r\nOne.\r\n\r\n  Two.\r\n \r\n\r\n"),
        written("b.txt", "Three."),
    ]
    assert read_plain(paths, whole_files=True).texts == ("\nOne.\n\n  Two.", "Three.")


def test_whole_files_end_behind_the_first_lines():
    paths = [
        written("a.txt", "one\n\ntwo\n\n"),
        written("b.txt", "three\n\nfour\nfive\n"),
        written("c.jsonl", '{"text": "six\\nseven"}\n{"text": "eight"}\n'),
    ]

    def texts(count, names=()):
        return read_plain(paths, whole_files=True, names=names, max_sentences=count).texts

    assert texts(2) == ("one\n\ntwo",)
    assert texts(4) == ("one\n\ntwo", "three\n\nfour")
    assert texts(6) == ("one\n\ntwo", "three\n\nfour\nfive", "six\nseven")
    assert texts(2, ("x", "y", "y")) == ("one\n\ntwo", "three\n\nfour")
    with pytest.raises(DataError, match="x: 3 lines were asked for, there are 2"):
        texts(3, ("x", "y", "y"))


def test_the_first_texts_and_their_hash():
    text = read_plain([written("a.txt", "one\ntwo\n")])
    assert text.first(1).sha256 == read_plain([written("b.txt", "one")]).sha256 != text.sha256
    with pytest.raises(DataError, match="3 texts were asked for, there are 2"):
        text.first(3)


@pytest.mark.parametrize(
    ("data", "message"),
    [("", "empty"), ("\n \n", "empty"), (b"fine\nno\xff\n", "line 2: not UTF-8"), (None, "no such file")],
)
def test_unusable_files(data, message):
    good = written("good.txt", "text")
    bad = Path("bad.txt") if data is None else written("bad.txt", data)
    with pytest.raises(DataError, match=f"^{bad}.*{message}"):
        read_plain([good, bad])


def test_the_texts_of_json_lines():
    path = Path("some.jsonl")
    path.write_text('{"text": "one\\ntwo", "id": 3}\n\n{"text": "three"}\n{"text": " "}\n', encoding="utf-8")
    assert read_plain([path]).texts == ("one\ntwo", "three")
    path.write_text('{"messages": [{"role": "user", "content": "one"}]}\n', encoding="utf-8")
    with pytest.raises(DataError, match="holds chats; texts are needed here"):
        read_plain([path])
    path.write_text('{"text": " "}\n', encoding="utf-8")
    with pytest.raises(DataError, match="holds no text"):
        read_plain([path])


def test_the_texts_of_a_json_file_are_a_list_or_lines():
    path = written("some.json", '[\n {"text": "one"},\n {"text": "two"}\n]\n')
    assert read_plain([path]).texts == ("one", "two")
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read_plain([path]).texts == ("one", "two")
    assert read_plain([write("some.json.gz", [{"text": "one"}])]).texts == ("one",)
    path.write_text('[{"instruction": "one", "output": "two"}]')
    with pytest.raises(DataError, match=r'some.json, entry 1: neither a "text" nor a chat'):
        read_plain([path])


TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}.{% endfor %}"


@pytest.fixture
def tokenizer():
    write_plain_tokenizer(Path())
    return load_tokenizer(Path())


def write(name: str, *rows: object) -> Path:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    return written(name, gzip.compress(lines) if name.endswith(".gz") else lines)


def test_files_of_one_name_are_one_text():
    files = [
        TextFile(write("a.txt", "one", "", "two"), "code"),
        TextFile(write("prose.txt", "three")),
        TextFile(write("b.jsonl.gz", {"text": "four\nlines"}), "code"),
    ]
    said = list[str]()
    code, prose = read_corpora(files, whole_files=False, say=said.append)
    assert said == ["Text: 2 files, each line a text (`whole_files` takes each file as one text)."]
    assert (code.name, code.documents) == ("code", ("one", "two", "four\nlines"))
    assert code.files == (files[0].path, files[2].path)
    assert (prose.name, prose.documents) == ("prose", ("three",))


def test_whole_files_are_documents_and_json_lines_stay_lines():
    plain, rows = (
        write("a.py", "if x:", "    y"),
        write("a.ndjson", {"text": "p"}, {"text": "q"}),
    )
    files = [TextFile(plain, "a"), TextFile(rows, "a")]
    corpus = read_corpora(files)[0]
    assert (corpus.documents, corpus.whole_files) == (("if x:\n    y", "p", "q"), True)
    plain.write_text("a" * 100)
    assert read_corpora(files, max_tokens=2)[0].documents == ("a" * 2 * CHARACTERS, "p", "q")


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
def test_rows_that_are_neither_are_named(row, message):
    path = write("rows.jsonl", {"text": "fine"}, row)
    with pytest.raises(DataError, match=message):
        read_corpora([TextFile(path)])


def test_rows_are_what_the_tokenizer_makes(tokenizer):
    texts = [f"the hen {number}" for number in range(600)]
    rows = list(token_rows(tokenizer, Corpus("a", (Path(),), tuple(texts))))
    assert rows == [tokenizer(text)["input_ids"] for text in texts]


def test_chats_go_through_the_template_and_nothing_is_added(tokenizer):
    tokenizer.chat_template = TEMPLATE
    chat = ({"role": "user", "content": "the hen"}, {"role": "assistant", "content": "a hat"})
    rows = list(token_rows(tokenizer, Corpus("a", (Path(),), ("the tin", chat, "a"))))
    expected = tokenizer("user the hen.assistant a hat.", add_special_tokens=False)["input_ids"]
    assert rows == [tokenizer("the tin")["input_ids"], expected, tokenizer("a")["input_ids"]]


def test_a_chat_needs_a_template(tokenizer):
    corpus = Corpus("a", (Path("chats.jsonl"),), ("a", ({"role": "user", "content": "hen"},)))
    with pytest.raises(DataError, match=r"chats\.jsonl: chat 2: the model's tokenizer has no chat template"):
        list(token_rows(tokenizer, corpus))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        list(token_rows(tokenizer, corpus))


def test_a_template_reaches_nothing_of_python(tokenizer):
    file = Path("made")
    tokenizer.chat_template = f"{{{{ cycler.__init__.__globals__.os.system('touch {file}') }}}}"
    with pytest.raises(DataError, match="unsafe"):
        list(token_rows(tokenizer, Corpus("a", (), (({"role": "user", "content": "hen"},),))))
    assert not file.exists()


# Examples with labels.


MNLI = {0: "ENTAILMENT", 1: "NEUTRAL", 2: "CONTRADICTION"}


def test_the_first_examples_and_the_hash():
    text = read_labelled(written("text.tsv", "0\ta\tb\n1\tc\td\n"))
    first = text.first(1)
    assert (first.labels, first.texts, first.seconds, first.lines) == (("0",), ("a",), ("b",), (1,))
    with pytest.raises(DataError, match="3 examples were asked for, it holds 2"):
        text.first(3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "empty"),
        ("0\ta\nno tab here\n", "line 2: 1 fields, where 2 or 3 are expected"),
        ("0\ta\n\n\tb\n", "line 3: no label"),
        ("0\t \n", "line 1: no text"),
        ("0\ta\t\n", "line 1: no text"),
        ("0\ta\tb\tc\n", "line 1: 4 fields"),
        ("0\ta\tb\n1\tc\n", "line 2: 2 fields, where line 1 has 3"),
        ("0\ta\n1\tb\tc\n", "line 2: 3 fields, where line 1 has 2"),
        ('{"text": "a"}\n', "line 1: no label"),
        ('{"label": true, "text": "a"}\n', "line 1: no label"),
        ('{"label": 1}\n', "line 1: no text"),
        ('{"label": 1, "text": 2}\n', "line 1: no text"),
        ('{"label": 1, "text": "a"}\n[1]\n', "line 2: not a JSON object"),
        ('{"label": 1, "text": "a"}\n{"label": 1\n', "line 2: not JSON"),
        (b"0\ta\n1\t\xe9\n", "line 2: not UTF-8"),
    ],
)
def test_unusable_lines_are_named(data, message):
    with pytest.raises(DataError, match=rf"^text\.tsv.*{message}"):
        read_labelled(written("text.tsv", data))


def _labels(*labels):
    return LabelledText(Path("t.tsv"), labels, ("x",) * len(labels), None, tuple(range(1, len(labels) + 1)))


def test_names_in_any_case_and_numbers():
    assert label_ids(_labels("NEUTRAL", "contradiction", "0", "Entailment"), MNLI) == [1, 2, 0, 0]


@pytest.mark.parametrize("label", ["3", "maybe"])
def test_unknown_labels_are_named_with_the_known_ones(label):
    with pytest.raises(DataError, match=rf"line 2: the model knows no label {label!r}\n.*NEUTRAL"):
        label_ids(_labels("0", label), MNLI)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 9, 3.8]), st.text("ab é\u2028\"'{,", min_size=1).filter(str.strip)),
        min_size=1,
    )
)
def test_both_forms_hold_the_same(rows):
    tabs = read_labelled(written("text.tsv", "".join(f"{label}\t{text}\n" for label, text in rows)))
    lines = "".join(json.dumps({"label": label, "text": text}) + "\n" for label, text in rows)
    assert tabs == read_labelled(written("text.tsv", lines))
    assert tabs.texts == tuple(text.strip() for _, text in rows)
