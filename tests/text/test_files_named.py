from pathlib import Path

import pytest

from prunecli.errors import UsageError
from prunecli.text.files import TextFile, names_of, parse_text_file


@pytest.mark.parametrize(
    ("value", "path", "name"),
    [
        ("a.txt", "a.txt", None),
        ("code=a.txt", "a.txt", "code"),
        ("code=x/a=b.txt", "x/a=b.txt", "code"),
        ("Code 2 =a.txt", "a.txt", "Code 2"),
        ("./a=b.txt", "a=b.txt", None),
        ("runs/ratio=0.5/text.txt", "runs/ratio=0.5/text.txt", None),
    ],
)
def test_a_value_is_a_file_or_a_name_and_a_file(value: str, path: str, name: str | None) -> None:
    assert parse_text_file(value) == TextFile(Path(path), name)


def test_a_file_that_is_there_has_an_equals_sign_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ratio=half.txt").write_text("a\n")

    assert parse_text_file("ratio=half.txt") == TextFile(Path("ratio=half.txt"))


@pytest.mark.parametrize(
    ("value", "says"),
    [("=a.txt", "no name"), (" =a.txt", "no name"), ("code=", "no file"), ("a,b=c", "a comma")],
)
def test_refuses(value: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_text_file(value)


def test_files_without_names_go_by_their_own() -> None:
    files = [parse_text_file(value) for value in ("x/wiki.jsonl.gz", "code=a.py", "code=b.py", ".hidden")]

    assert names_of(files) == ("wiki", "code", "code", "hidden")
