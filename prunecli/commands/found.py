"""What commands find by themselves where nothing is given: checkpoints, pairs, the demo's text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.commands.console import note
from prunecli.commands.options import listed
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.text.parallel import ParallelText

KEY = "prunecli"
"""The key of config.json that marks a checkpoint written by prunecli."""

SPLITS = ("train", "val", "dev")
"""Where whole texts are counted and no --split is given."""


def prunecli_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints that prunecli wrote in `directory` (not below), by name."""
    return sorted(path.parent for path in directory.glob("*/config.json") if KEY in _config(path.parent))


def checkpoint_directory(given: Path) -> Path:
    """The directory of a checkpoint that the user named; a model of the hub is fetched, where it is not here yet.

    Raises:
        HubError, OutputError, CheckpointError: as `local_directory`.
    """
    from prunecli.tensors.hub.fetch import local_directory

    quiet = console.is_hushed()
    return local_directory(given, say=console.note, progress=console.lines(quiet), bars=not quiet)


def checkpoint_or_demo(given: Path | None) -> Path:
    """The directory of `given`, or the bundled demo model, said in one line."""
    if given is not None:
        return checkpoint_directory(given)
    from prunecli import demo

    note("No checkpoint given: using the bundled demo model.")
    found: Path = demo.CHECKPOINT
    return found


def checkpoints_or_found(given: Sequence[Path] | None) -> list[Path]:
    """Those of `given`; else the bundled demo model and every prunecli checkpoint of the working directory."""
    if given:
        return [checkpoint_directory(path) for path in given]
    from prunecli import demo

    found = [path.relative_to(Path.cwd()) for path in prunecli_checkpoints(Path.cwd())]
    beside = f" with {', '.join(map(str, found))}" if found else ""
    note(f"No checkpoint given: using the bundled demo model{beside}.")
    return [demo.CHECKPOINT, *found]


def pruned_pairs(checkpoints: Sequence[Path], pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those of `pairs` that every checkpoint pruned for certain languages was pruned for."""
    kept = list(pairs)
    for path in checkpoints:
        for step in _steps(path):
            arguments = step.get("arguments")
            if isinstance(arguments, Mapping):
                sources, targets = _names(arguments.get("source")), _names(arguments.get("target"))
                kept = [p for p in kept if p[0] in (sources or (p[0],)) and p[1] in (targets or (p[1],))]
    return kept


def chosen_splits(data: Path, text: str | None) -> tuple[str, ...]:
    """Those of --split; else those of SPLITS that there are."""
    from prunecli.text.parallel import has_split

    return listed("--split", text) or tuple(name for name in SPLITS if has_split(data, name)) or SPLITS[:1]


def chosen_text(
    data: Path | None,
    split: str,
    source_file: Path | None,
    target_file: Path | None,
    pairs: str | None,
    langs: str | None,
) -> tuple[ParallelText, tuple[tuple[str, str], ...]]:
    """The text and the pairs that the shared options name.

    Raises:
        UsageError: options that contradict each other.
        DataError: text that cannot be used.
    """
    from prunecli.text.parallel import languages_of, parse_pairs, read_pair, read_parallel

    if source_file is not None or target_file is not None:
        if source_file is None or target_file is None or pairs is None:
            raise UsageError(
                "--source-file, --target-file and --pairs go together",
                "Give all three: --source-file F --target-file G --pairs eng_Latn-fra_Latn.",
            )
        if data is not None or langs is not None:
            raise UsageError("--source-file does not go with --data or --langs", "Give one of them.")
        text = read_pair(source_file, target_file, pairs)
        return text, ((text.languages[0], text.languages[1]),)
    if data is None:
        data = demo_text()
    chosen = parse_pairs(pairs, langs, languages_of(data, split))
    needed = tuple(dict.fromkeys(name for pair in chosen for name in pair))
    return read_parallel(data, split, needed), chosen


def demo_text() -> Path:
    """The demo's text, said in one line with its languages: a model of the user's own knows others."""
    from prunecli import demo

    names = ", ".join(demo.LANGUAGES)
    note(f"No --data given: using the demo's text, in {names}; give yours with --data.")
    return demo.DATA


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    return tuple(str(name).strip() for name in value) if isinstance(value, Sequence) else ()


def _steps(path: Path) -> list[Mapping[str, Any]]:
    structure = _config(path).get(KEY)
    history = structure.get("history") if isinstance(structure, Mapping) else None
    return [step for step in history if isinstance(step, Mapping)] if isinstance(history, list) else []


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, Mapping) else {}
