"""Experts to keep, from a file: ids that the authors of 2212.09811 published, or a saved selection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

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
    form = "a plain list"
    if isinstance(content, dict):
        if "format" not in content and not isinstance(content.get("kept"), dict):
            return _by_layer(path, _picked(path, content, axes, sources, targets), axes)
        form = "a saved selection"
    if sources or targets:
        raise UsageError(f"{path} is {form}: it takes no --source and no --target.", "Leave them out.")
    return _by_layer(path, content, axes) if isinstance(content, list) else read_kept(path, axes, content)


def _picked(
    path: Path,
    content: Mapping[str, Any],
    axes: Sequence[Axis],
    sources: Sequence[str],
    targets: Sequence[str],
) -> list[Any]:
    """The ids under the keys that the languages pick."""
    if not sources or not targets:
        raise UsageError(
            f"{path} holds experts by language: name --source and --target.",
            near_names("", list(content), "Known"),
        )
    encoder = sum(axis.original for axis in axes if axis.side == "encoder")
    ids: list[Any] = []
    for source in sources:
        for target in targets:
            if f"{source}-{target}" in content:
                ids += _list(path, content, f"{source}-{target}")
            elif len(sources) == len(targets) == 1 or source != target:
                ids += [e for e in _list(path, content, source, f"{source}-{ANY}") if e < encoder]
                ids += [e for e in _list(path, content, target, f"{ANY}-{target}") if e >= encoder]
    if not ids:
        raise UsageError(f"{sources[0]} to {targets[0]} is no translation.", "Name two languages.")
    return ids


def _list(path: Path, content: Mapping[str, Any], *keys: str) -> list[Any]:
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


def _by_layer(path: Path, ids: Iterable[Any], axes: Sequence[Axis]) -> dict[str, tuple[int, ...]]:
    """Flat ids to ids per layer."""
    starts = [0, *accumulate(axis.original for axis in axes)]
    kept: dict[str, set[int]] = {axis.name: set() for axis in axes}
    for expert in ids:
        if type(expert) is not int or not 0 <= expert < starts[-1]:
            raise StatisticsError(
                f"{path}: {expert!r} is no expert id; the model's go from 0 to {starts[-1] - 1}.",
                f"It has {len(axes)} sparse layers; the published files are for NLLB-200 54.5B.",
            )
        row = int(np.searchsorted(starts, expert, side="right")) - 1
        kept[axes[row].name].add(expert - starts[row])
    for axis in axes:
        if absent := sorted(kept[axis.name].difference(axis.ids)):
            raise StatisticsError(
                f"{path}: keeps expert {absent[0]} of {axis.module}, which the checkpoint no longer holds.",
                "Select from the original model.",
            )
    return {name: tuple(sorted(own)) for name, own in kept.items()}
