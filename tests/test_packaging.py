import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.markdown_pages import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "https://forge.invalid/someone/prunecli"


@pytest.fixture(scope="module")
def setup():
    return runpy.run_path(str(ROOT / "setup.py"))


def test_links_to_files_become_absolute(setup):
    links = parse(setup["long_description"](README, ADDRESS)).links
    assert all(link.startswith("https://") for link in links)
    own = [re.sub(rf"^{ADDRESS}/(blob|raw)/HEAD/", "", link) for link in links if link.startswith(ADDRESS)]
    assert own == [link for link in parse(README).links if "://" not in link]
    assert own
    assert all((ROOT / path.partition("#")[0]).exists() for path in own)


@pytest.mark.parametrize(
    ("text", "absolute", "bare"),
    [
        ("[a `b`](docs/x.md#y)", f"[a `b`]({ADDRESS}/blob/HEAD/docs/x.md#y)", "a `b`"),
        ("![a](docs/x.png)", f"![a]({ADDRESS}/raw/HEAD/docs/x.png)", "a"),
        *(
            (same,) * 3
            for same in ("[a](https://b.invalid/c)", "[a](mailto:b@c.invalid) [d](#e)", "x[0](y z)")
        ),
    ],
)
def test_other_links_stay(setup, text, absolute, bare):
    make = setup["long_description"]
    assert make(text, ADDRESS) == make(text, f"{ADDRESS}/") == absolute
    assert make(text, None) == bare


FOLDERS = ("benchmarks", "docs", "prunecli", "recipes", "tests", "tools")


def build(what: str, source: Path) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{what}('../{what}')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (made,) = Path(what).iterdir()
    return made


def test_the_source_distribution_is_the_repository_and_its_wheel_holds_the_recipes():
    pytest.importorskip("setuptools", minversion="77")
    copy, made = Path("source"), ("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(*made))
    for path in filter(Path.is_file, ROOT.glob("[!.]*")):
        shutil.copy(path, copy)
    files = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    with tarfile.open(build("sdist", copy)) as archive:
        archive.extractall()
    (source,) = Path().glob("prunecli-*")
    assert sorted(str(path) for path in files if not (source / path).is_file()) == []
    with zipfile.ZipFile(build("wheel", source)) as wheel:
        for path in (ROOT / "recipes").iterdir():
            assert wheel.read(f"prunecli/recipes/files/{path.name}") == path.read_bytes()
