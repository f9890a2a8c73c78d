"""A module's test is found by its name: tests/X/test_Y.py, or test_Y_topic.py, is about prunecli/X/Y.py."""

import ast
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FREE = ("contracts", "fuzz", "gpu", "reference")
"""Folders of tests that are about many modules at once."""

ACROSS = {
    "test_api.py": "the page for programs",
    "test_bad_endings.py": "what is left behind by every writing command",
    "test_docs.py": "the pages",
    "test_layout.py": "this",
    "test_packaging.py": "the wheel",
    "commands/test_hub_models.py": "models by name, and of sentence-transformers, in all commands",
    "methods/experts/test_layerwise.py": "gate statistics whose model stays on disk, by several processes",
    "results/test_reading.py": "`results.read`, of every format",
    "running/layerwise/test_families.py": "every family, layer by layer",
    "families/test_found.py": "families that nobody declared",
    "families/test_tiny.py": "tiny models of every text model type",
    "training/test_headless.py": "training of encoders without a head",
    "training/test_processes.py": "training by several processes",
    "training/test_stock_models.py": "training of reduced models, and of models in their stock classes",
}
"""Tests of what no module does alone -> what that is."""


def modules(folder: Path) -> set[str]:
    """Names of the modules and packages in the folder of prunecli, or of tools, that these tests are about."""
    return {
        path.stem
        for source in (ROOT / "prunecli" / folder, ROOT / "tools" / folder)
        if source.is_dir()
        for path in source.iterdir()
        if path.suffix == ".py" or path.is_dir()  # data too
    }


def is_about(name: str, known: set[str]) -> bool:
    """Whether test_NAME.py begins with a module's name."""
    words = name.split("_")
    return any("_".join(words[:count]) in known for count in range(1, len(words) + 1))


def test_every_test_is_named_after_its_module():
    paths = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    astray = [
        path.as_posix()
        for path in paths
        if path.parts[0] not in FREE
        and path.as_posix() not in ACROSS
        and not is_about(path.stem.removeprefix("test_"), modules(path.parent))
    ]
    assert not astray, "\n".join(sorted(astray))


def test_exceptions_are_of_tests_that_exist():
    assert [name for name in ACROSS if not (TESTS / name).is_file()] == []


def test_scripts_import_what_there_is():
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").rglob("*.py")]
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "prunecli":
                continue
            module = import_module(str(node.module))
            absent = [name.name for name in node.names if not hasattr(module, name.name)]
            for name in absent:
                import_module(f"{node.module}.{name}")
    assert scripts
