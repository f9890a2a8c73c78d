import gzip
from pathlib import Path

import pytest

from prunecli.errors import DataError, UsageError
from prunecli.text.files import read_lines
from prunecli.text.parallel import (
    ParallelText,
    has_split,
    languages_of,
    parse_pairs,
    read_groups,
    read_pair,
    read_parallel,
)
from tests.text.files import written


@pytest.fixture(params=["{split}.{language}", "{split}/{language}.{split}"])
def directory(request):
    """A directory with one text in either layout, beside files that are no text."""
    for language, lines in {
        "eng_Latn": "one\ntwo\n",
        "fra_Latn": "un\ndeux\n",
        "deu_Latn": "eins\nzwei\n",
    }.items():
        written(request.param.format(split="dev", language=language), lines)
    written("README.md", "about")
    written("dev.eng_Latn.bz2", b"BZh")
    Path("empty").mkdir()
    return Path()


def test_both_layouts_read_the_same(directory):
    text = read_parallel(directory, "dev")
    assert text == ParallelText(
        "dev", {"deu_Latn": ("eins", "zwei"), "eng_Latn": ("one", "two"), "fra_Latn": ("un", "deux")}
    )
    assert len(text) == 2
    assert languages_of(directory, "dev") == ("deu_Latn", "eng_Latn", "fra_Latn")


def test_languages_come_in_the_order_asked_for_and_the_first_sentences_only(directory):
    text = read_parallel(directory, "dev", ["fra_Latn", "eng_Latn"]).first(1)
    assert text.languages == ("fra_Latn", "eng_Latn")
    assert dict(text.sentences) == {"fra_Latn": ("un",), "eng_Latn": ("one",)}


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ("a", "b")),
        (b"a\nb", ("a", "b")),
        (b"a\r\nb\r\n", ("a", "b")),
        (b"\xef\xbb\xbfa\nb\n", ("a", "b")),
        (b"a\n\nb\n\n", ("a", "", "b", "")),
        ("a\u2028b\x0cc\n d \n".encode(), ("a\u2028b\x0cc", " d ")),
    ],
)
def test_lines(data, lines):
    assert read_lines(written("x", data)) == lines


@pytest.mark.parametrize("pair", ["eng_Latn", "a-b,c-d"])
def test_files_without_one_pair_are_refused(pair):
    file = written("a", "x\n")
    with pytest.raises(UsageError, match="does not name"):
        read_pair(file, file, pair.split(","))


def test_different_line_counts_name_both_files_and_counts():
    source, target = written("a", "x\ny\n"), written("b", "u\n")
    with pytest.raises(DataError, match=r"^a has 2 lines, .*b has 1"):
        read_pair(source, target, ["eng_Latn-fra_Latn"])


@pytest.mark.parametrize("layout", ["{split}.{language}", "{split}/{language}.{split}"])
def test_packed_text_reads_as_what_it_holds(layout):
    plain = "one\r\n\ntwo \u2028 three\n".encode()
    packed = gzip.compress(plain[:7]) + gzip.compress(plain[7:])  # two members are one file
    for language in ("eng_Latn", "fra_Latn"):
        written(f"{layout.format(split='train', language=language)}.gz", packed)
    assert languages_of(Path(), "train") == ("eng_Latn", "fra_Latn")
    text = read_parallel(Path(), "train")
    assert text.split == "train"
    assert text.sentences["fra_Latn"] == ("one", "", "two \u2028 three")
    assert not has_split(Path(), "train.eng_Latn")
    written(layout.format(split="train", language="fra_Latn"), "un\n\ndeux\n")
    assert read_parallel(Path(), "train").sentences["fra_Latn"] == ("un", "", "deux"), "the unpacked one"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (gzip.compress(b"one\ntwo\n" * 99, mtime=0)[:-9], "not a whole gzip file"),
        (gzip.compress(b"one", mtime=0)[:-6] + b"\0" * 6, "not a whole gzip file"),
        (gzip.compress(b"one", mtime=0)[:10] + b"\xff" * 40, "not a whole gzip file"),
        (b"plain text\n", "not a whole gzip file"),
        (b"", "the file is empty"),
        (gzip.compress(b"\xef\xbb\xbf", mtime=0), "the file is empty"),
        (gzip.compress(b"a\nb\xff\n", mtime=0), "line 2: not UTF-8"),
    ],
)
def test_damaged_packed_files_are_named(data, reason):
    with pytest.raises(DataError, match=rf"^text\.gz.*{reason}"):
        read_lines(written("text.gz", data))


def test_no_such_split_lists_those_that_there_are(directory):
    with pytest.raises(DataError, match=r"no split 'test'.*\nSplits found: dev\.$"):
        read_parallel(directory, "test")


def test_an_unknown_language_suggests_a_near_one(directory):
    with pytest.raises(DataError, match=r"no text in 'fra_Lat'.*\n.*fra_Latn"):
        read_parallel(directory, "dev", ["eng_Latn", "fra_Lat"])


@pytest.mark.parametrize(
    ("pairs", "langs", "expected"),
    [
        ("a-b,b-a,a-b", None, (("a", "b"), ("b", "a"))),
        (None, "b,a", (("b", "a"), ("a", "b"))),
        (None, None, (("a", "b"), ("a", "x-y"), ("b", "a"), ("b", "x-y"), ("x-y", "a"), ("x-y", "b"))),
        ("a-x-y,x-y-b", None, (("a", "x-y"), ("x-y", "b"))),
    ],
)
def test_pairs(pairs, langs, expected):
    assert parse_pairs(pairs and pairs.split(","), langs and langs.split(","), ("a", "b", "x-y")) == expected


@pytest.mark.parametrize(
    ("pairs", "langs", "error", "message"),
    [
        *((pair, None, UsageError, "not a language pair") for pair in ("ab", "a-")),
        ("a-a", None, UsageError, "same language"),
        (None, "a", UsageError, "no language pair"),
        ("a-c", None, DataError, "unknown language 'c'"),
        (None, "a,c", DataError, "unknown language 'c'"),
    ],
)
def test_pairs_that_are_refused(pairs, langs, error, message):
    with pytest.raises(error, match=message):
        parse_pairs(pairs and pairs.split(","), langs and langs.split(","), ("a", "b"))


CLASSES = {"wol_Latn": "low", "eng_Latn": "very high"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("classes.tsv", b"wol_Latn\tlow\r\n\neng_Latn\tvery high\n"),
        ("classes.txt", b"\xef\xbb\xbfwol_Latn\tlow\n eng_Latn \t very high \nwol_Latn\tlow"),
        ("classes.tsv.gz", gzip.compress(b"wol_Latn\tlow\neng_Latn\tvery high\n", mtime=0)),
        ("classes.JSON", b'{"wol_Latn": "low", "eng_Latn": "very high"}'),
    ],
)
def test_both_forms(name, content):
    Path(name).write_bytes(content)
    assert read_groups(Path(name)) == CLASSES


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.tsv", None, "no such file"),
        ("g.tsv", "eng_Latn high\n", "line 1 is not a language, a tab and a group"),
        ("g.tsv", "eng_Latn\thigh\nwol_Latn\t\n", "line 2 is not"),
        ("g.tsv", "eng_Latn\thigh\tmore\n", "line 1 is not"),
        ("g.tsv", "eng_Latn\thigh\neng_Latn\tlow\n", "line 2: eng_Latn is in high already"),
        ("g.tsv", "\n\n", "empty"),
        ("g.json", "{}", "no language"),
        ("g.json", '{"eng_Latn": 3}', "not an object of language: group"),
        ("g.json", '["eng_Latn"]', "not an object of language: group"),
        ("g.json", '{"eng_Latn": ', "cut short"),
    ],
)
def test_refused(name, content, message):
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_groups(Path(name))
