"""Experts to keep, from a file: ids that the authors of 2212.09811 published, or a selection that was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.experts.budget import Layer
from prunecli.model.axes import Axis
from prunecli.results.gates import ANY
from prunecli.selection.saved import read_kept
from prunecli.tensors.json_files import read_json
from prunecli.text.lines import near_names


def read_experts(
    path: Path,
    layers: Sequence[Layer],
    originals: Sequence[int],
    sources: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> dict[str, tuple[int, ...]]:
    """The experts to keep from a file of expert ids: layer's name -> original ids, ascending.

    Forms: a plain list of ids; `{pair: [ids]}`, of which the pairs of the given sources and targets are
    united; `{language: [ids]}`, of which the encoder takes the given sources' and the decoder the given
    targets'; a selection printed by `--dry-run --json`, or only its `{"kept": {layer: [ids]}}`, with the layers' names
    as on disk. An id counts through the original experts of all sparse layers, encoder first; of a selection,
    through those of its layer.

    Args:
        path: the file.
        layers: the checkpoint's sparse layers, encoder first.
        originals: how many experts each of them had originally.
        sources: source languages.
        targets: target languages.

    Raises:
        StatisticsError: damaged, an unknown language, an id that the model or the checkpoint does not hold.
        UsageError: languages that the file does not take, or none where it needs them.
    """
    content = read_json(path)
    if not isinstance(content, (dict, list)) or not content:
        raise StatisticsError(f"{path}: holds no expert ids.")
    if isinstance(content, list):
        _refuse_languages(path, "a plain list", sources, targets)
        return _by_layer(path, content, layers, originals)
    if "format" in content or isinstance(content.get("kept"), dict):
        _refuse_languages(path, "a saved selection", sources, targets)
        axes = [
            Axis(f"{layer.name}.experts", "expert", layer.experts, len(layer.experts)) for layer in layers
        ]
        kept = read_kept(path, axes, content)
        return {layer.name: kept[axis.name] for layer, axis in zip(layers, axes, strict=True)}
    ids = _picked(path, content, layers, originals, sources, targets)
    return _by_layer(path, ids, layers, originals)


def _refuse_languages(path: Path, form: str, sources: Sequence[str], targets: Sequence[str]) -> None:
    if sources or targets:
        raise UsageError(f"{path} is {form}: it takes no --source and no --target.", "Leave them out.")


def _picked(
    path: Path,
    content: Mapping[str, Any],
    layers: Sequence[Layer],
    originals: Sequence[int],
    sources: Sequence[str],
    targets: Sequence[str],
) -> list[Any]:
    """The ids under the keys that the languages pick."""
    if not sources or not targets:
        raise UsageError(
            f"{path} holds experts by language: name --source and --target.",
            near_names("", list(content), "Known"),
        )
    encoder = sum(n for layer, n in zip(layers, originals, strict=True) if layer.side == "encoder")
    ids: list[Any] = []
    for source in sources:
        for target in targets:
            if f"{source}-{target}" in content:
                ids += _list(path, content, f"{source}-{target}")
            elif len(sources) == len(targets) == 1 or source != target:
                ids += [e for e in _language(path, content, source, f"{source}-{ANY}") if e < encoder]
                ids += [e for e in _language(path, content, target, f"{ANY}-{target}") if e >= encoder]
    if not ids:
        raise UsageError(f"{sources[0]} to {targets[0]} is no translation.", "Name two languages.")
    return ids


def _language(path: Path, content: Mapping[str, Any], language: str, alternative: str) -> list[Any]:
    for key in (language, alternative):
        if key in content:
            return _list(path, content, key)
    raise StatisticsError(
        f"{path}: no experts for {language!r}.", near_names(language, list(content), "Known")
    )


def _list(path: Path, content: Mapping[str, Any], key: str) -> list[Any]:
    ids = content[key]
    if not isinstance(ids, list) or not all(type(e) is int for e in ids):
        raise StatisticsError(f"{path}: {key!r} is not a list of expert ids.")
    return ids


def _by_layer(
    path: Path, ids: Iterable[Any], layers: Sequence[Layer], originals: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Flat ids to ids per layer."""
    starts = [0, *accumulate(originals)]
    kept: dict[str, set[int]] = {layer.name: set() for layer in layers}
    for expert in ids:
        if type(expert) is not int or not 0 <= expert < starts[-1]:
            raise StatisticsError(
                f"{path}: {expert!r} is no expert id; the model's go from 0 to {starts[-1] - 1}.",
                f"It has {len(layers)} sparse layers; the published files are for NLLB-200 54.5B.",
            )
        row = int(np.searchsorted(starts, expert, side="right")) - 1
        kept[layers[row].name].add(expert - starts[row])
    return _in_layers(path, kept, layers)


def _in_layers(
    path: Path, kept: Mapping[str, set[int]], layers: Sequence[Layer]
) -> dict[str, tuple[int, ...]]:
    for layer in layers:
        absent = sorted(kept[layer.name] - set(layer.experts))
        if absent:
            raise StatisticsError(
                f"{path}: keeps expert {absent[0]} of {layer.name}, which the checkpoint no longer holds.",
                "Select from the original model.",
            )
    return {layer.name: tuple(sorted(kept[layer.name])) for layer in layers}
