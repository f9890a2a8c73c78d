"""The public names, and the page that shows them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import prunecli

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def test_every_public_name_is_there() -> None:
    for name in prunecli.__all__:
        assert getattr(prunecli, name) is not None, name
    assert set(prunecli.__all__) <= set(dir(prunecli))
    with pytest.raises(AttributeError, match="no_such_name"):
        prunecli.no_such_name


def test_importing_prunecli_imports_nothing_heavy() -> None:
    heavy = "{name for name in ('torch', 'transformers', 'pandas') if name in sys.modules}"
    script = f"import sys, prunecli; print({heavy})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) > 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_the_page_names_every_function() -> None:
    page = PAGE.read_text(encoding="utf-8")
    functions = [name for name in prunecli.__all__ if name.islower() and name not in ("demo", "results")]
    assert [name for name in functions if name not in page and name != "__version__"] == []
