import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import urlsplit

import pytest
import typer
import typer.main

from prunecli.commands import app
from prunecli.commands.command import function_of
from prunecli.options import RENAMED
from tests.markdown_pages import Page, parse
from tools import option_tables

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
COMMANDS = {name for names in app.COMMANDS.values() for name in names}


@cache
def read(path: Path) -> Page:
    return parse(path.read_text(encoding="utf-8"))


def targets(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Each link to the repository: as written, the file, the anchor."""
    for link in read(path).links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            yield link, (path.parent / parts.path).resolve() if parts.path else path, parts.fragment


def broken(path: Path) -> list[str]:
    return [
        link
        for link, file, anchor in targets(path)
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in read(file).anchors)
    ]


def of_app(command: typer.Typer) -> frozenset[str]:
    parameters = typer.main.get_command(command).params
    return frozenset(
        name for one in parameters for name in (*one.opts, *one.secondary_opts) if name[0] == "-"
    )


@cache
def options(name: str) -> frozenset[str]:
    """The options of a command, `--help` with them; of `prunecli` itself where the name is empty; of a script."""
    if name.endswith(".py"):
        return frozenset(re.findall(r'"(--[\w-]+)"', (ROOT / name).read_text(encoding="utf-8")))
    alone = typer.Typer(add_completion=False)
    if name:
        alone.command()(function_of(name))
    return of_app(alone if name else app.app) | {"--help", "--help-all"}


def named(text: str, own: str | None) -> Iterator[tuple[str | None, str]]:
    """The options in a span of code or a line: of which command (None: of any), and the option.

    An option without a command is that of the page's `own` one.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # an apostrophe: not a command line
        words = text.split()
    if "-m" in words:  # torchrun … -m prunecli …
        words = words[words.index("-m") + 1 :]
        if words and words[0].startswith("prunecli."):
            words[0] = f"{words[0].replace('.', '/')}.py"
    elif words and words[0] == "python":
        words = words[1:]
    if words and words[0] == "prunecli":
        words = words[1:]
        command = words[0] if words and words[0] in COMMANDS else ""
    elif words and (words[0] in COMMANDS or words[0].endswith(".py")):
        command = words[0]
    elif words and words[0].startswith("--"):
        command = own
    else:
        return
    yield from ((command, word.split("=")[0]) for word in words if re.match(r"--\w", word))


def unknown(page: Page, own: str | None) -> list[str]:
    """Options that are not those of their command; outside of a command's page, of none nor of the page's scripts."""
    found = [each for text in (*page.code, *page.typed) for each in named(text, own)]
    known = COMMANDS | {"", *(command for command, _ in found if command is not None)}
    everything = frozenset().union(*map(options, known))
    return [
        f"{command or 'prunecli'} {option}"
        for command, option in found
        if option not in (everything if command is None else options(command))
    ]


def of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=of)
def test_links_and_anchors_lead_somewhere(path):
    assert broken(path) == []


def test_every_page_is_reached_from_the_readme_and_from_the_index():
    for start in (ROOT / "README.md", DOCS / "index.md"):
        reached, waiting = {start}, [start]
        while waiting:
            new = {file for _, file, _ in targets(waiting.pop()) if file.suffix == ".md"} - reached
            reached |= new
            waiting += sorted(new)
        assert set(DOCS.rglob("*.md")) - reached <= {DOCS / "index.md"}, start


def test_every_command_has_a_page_and_every_page_a_command():
    assert {path.stem for path in (DOCS / "reference" / "commands").iterdir()} == COMMANDS


@pytest.mark.parametrize("path", PAGES, ids=of)
def test_options_that_a_page_names_exist(path):
    renamed = {old for names in RENAMED.values() for old in names} if path.name == "CHANGELOG.md" else set()
    own = path.stem if path.parent.name == "commands" else None
    assert [one for one in unknown(read(path), own) if one.split()[1] not in renamed] == []


def test_tables_of_options_are_those_of_the_commands():
    assert option_tables.main(check=True) == 0, "write them with python -m tools.option_tables"


@pytest.mark.parametrize("path", PAGES, ids=of)
def test_files_that_a_page_names_exist(path):
    folders = "benchmarks|docs|prunecli|recipes|tests"
    files = [text for text in read(path).code if re.fullmatch(rf"(?:{folders})/[\w./-]+", text)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_code_that_a_page_names_exists():
    names = {text for page in PAGES for text in read(page).code if re.fullmatch(r"prunecli(\.\w+)+", text)}
    assert len(names) > 40
    assert [name for name in sorted(names) if not is_importable(name)] == []
    assert not is_importable("prunecli.errors.NoSuchError")
    assert not is_importable("prunecli.no_such_module")


def is_importable(name: str) -> bool:
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
