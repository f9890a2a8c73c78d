"""Experts to keep, from a file: ids that the authors of 2212.09811 published, or a saved selection."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from prunecli.errors import StatisticsError, UsageError
from prunecli.model.axes import Axis
from prunecli.results.gates import ANY
from prunecli.selection.saved import read_kept
from prunecli.tensors.json_files import read_json
from prunecli.text.lines import near_names


def read_experts(
    path: Path, axes: Sequence[Axis], sources: Sequence[str] = (), targets: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """The experts to keep from a file of expert ids: name of the axis -> original ids, ascending.

    Forms: a plain list of ids; `{pair: [ids]}`, of which the pairs of the given sources and targets are
    united; `{language: [ids]}`, of which the encoder takes the given sources' and the decoder the given
    targets'; a selection printed by `--dry-run --json`, or only its `{"kept": {axis: [ids]}}`, with names as on
    disk. An id counts through the original experts of all sparse layers, encoder first; in a selection,
    through those of its layer.

    Args:
        path: the file.
        axes: the experts of each sparse layer, encoder first.
        sources: source languages.
        targets: target languages.

    Raises:
        StatisticsError: damaged, an unknown language, an id that the model or the checkpoint does not hold.
        UsageError: languages that the file does not take, or none where it needs them.
    """
    content = read_json(path)
    if not isinstance(content, (dict, list)) or not content:
        raise StatisticsError(f"{path}: holds no expert ids.")
    is_saved = isinstance(content, dict) and ("format" in content or isinstance(content.get("kept"), dict))
    if isinstance(content, dict) and not is_saved:
        content = _picked(path, content, axes, sources, targets)
    elif sources or targets:
        form = "a saved selection" if is_saved else "a plain list"
        raise UsageError(f"{path} is {form}: it takes no --source and no --target.", "Leave them out.")
    if isinstance(content, dict):
        return read_kept(path, axes, content)
    starts = [0, *accumulate(axis.original for axis in axes)]
    kept: dict[str, list[int]] = {axis.name: [] for axis in axes}
    for expert in content:
        if type(expert) is not int or not 0 <= expert < starts[-1]:
            raise StatisticsError(
                f"{path}: {expert!r} is no expert id; the model's go from 0 to {starts[-1] - 1}.",
                f"It has {len(axes)} sparse layers; the published files are for NLLB-200 54.5B.",
            )
        row = bisect_right(starts, expert) - 1
        kept[axes[row].name].append(expert - starts[row])
    return read_kept(path, axes, {"kept": kept})


def _picked(
    path: Path,
    content: Mapping[str, Any],
    axes: Sequence[Axis],
    sources: Sequence[str],
    targets: Sequence[str],
) -> list[int]:
    """The ids under the keys that the languages pick."""

    def ids_of(*keys: str) -> list[int]:
        """The ids under the first of the keys that the file has."""
        key = next((key for key in keys if key in content), None)
        if key is None:
            raise StatisticsError(
                f"{path}: no experts for {keys[0]!r}.", near_names(keys[0], list(content), "Known")
            )
        ids = content[key]
        if not isinstance(ids, list) or not all(type(e) is int for e in ids):
            raise StatisticsError(f"{path}: {key!r} is not a list of expert ids.")
        return ids

    if not sources or not targets:
        raise UsageError(
            f"{path} holds experts by language: name --source and --target.",
            near_names("", list(content), "Known"),
        )
    encoder = sum(axis.original for axis in axes if axis.side == "encoder")
    ids: list[int] = []
    for source in sources:
        for target in targets:
            if f"{source}-{target}" in content:
                ids += ids_of(f"{source}-{target}")
            elif len(sources) == len(targets) == 1 or source != target:
                ids += [e for e in ids_of(source, f"{source}-{ANY}") if e < encoder]
                ids += [e for e in ids_of(target, f"{ANY}-{target}") if e >= encoder]
    if not ids:
        raise UsageError(f"{sources[0]} to {targets[0]} is no translation.", "Name two languages.")
    return ids
