from __future__ import annotations

import gzip

import pytest

from prunecli.errors import DataError
from prunecli.text.parallel import read_groups

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
def test_both_forms(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_groups(tmp_path / name) == CLASSES


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
def test_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_groups(tmp_path / name)
