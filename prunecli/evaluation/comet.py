"""COMET, a learned score of translations, by the program `comet-score` of an installation of its own.

unbabel-comet (2.2.7) needs transformers 4, huggingface_hub 0 and numpy 1: it cannot be in prunecli's own environment.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prunecli.errors import PruneError
from prunecli.tensors.json_files import read_json

PROGRAM = "comet-score"


def require_comet() -> str:
    """Where the program is.

    Raises:
        PruneError: it is not on the path.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise PruneError(
            f"`comet`: {PROGRAM} is not installed",
            "Install it beside prunecli, in an environment of its own: pipx install unbabel-comet.",
        )
    return program


def comet_scores(
    model: str,
    sources: Sequence[str],
    references: Sequence[str],
    systems: Mapping[str, Sequence[str]],
    *,
    gpu: bool = False,
) -> dict[str, NDArray[np.float64]]:
    """Score each sentence of each system, 0 to 100 (the program's own, times 100).

    Args:
        model: name of the hub or a `.ckpt` file; one that needs no references is given them all the same.
        systems: label -> outputs, in the order of `sources` and `references`.
        gpu: whether it runs on one.

    Returns:
        Label -> `[sentences]`.

    Raises:
        PruneError: the program is not installed, or failed; with its last line.
    """
    program = require_comet()
    model = str(Path(model).resolve()) if Path(model).is_file() else model
    with tempfile.TemporaryDirectory(prefix="prunecli-") as folder:
        directory = Path(folder)
        files = {label: directory / f"system-{number}.txt" for number, label in enumerate(systems)}
        for path, lines in (
            (directory / "sources.txt", sources),
            (directory / "references.txt", references),
            *((files[label], outputs) for label, outputs in systems.items()),
        ):
            path.write_text("".join(f"{' '.join(line.split())}\n" for line in lines), encoding="utf-8")
        command = [program, "-s", "sources.txt", "-r", "references.txt", "--model", model, "--quiet"]
        command += ["--gpus", "1" if gpu else "0", "--to_json", "scores.json", "-t"]
        command += [path.name for path in files.values()]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not (directory / "scores.json").is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            why = lines[-1].strip() if lines else f"it ended with status {done.returncode}"
            raise PruneError(f"{PROGRAM} --model {model}: {why}", "Leave `comet` out, or correct its model.")
        payload = read_json(directory / "scores.json", error=PruneError)
    scores = {
        label: np.array([100 * float(row["COMET"]) for row in payload[path.name]])
        for label, path in files.items()
    }
    if any(len(values) != len(sources) or not np.isfinite(values).all() for values in scores.values()):
        raise PruneError(f"{PROGRAM} --model {model}: not a finite score for each sentence")
    return scores
