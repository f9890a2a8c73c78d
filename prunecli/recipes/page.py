"""The page of all that a recipe made, as one more step of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prunecli.errors import UsageError
from prunecli.recipes.engine import Step, related


def page_step(steps: Sequence[Step], page: Path) -> Step:
    """`prunecli report` of the folder that holds what the steps write, with the checkpoints that they began with.

    Raises:
        UsageError: their outputs lie in no one folder, or one of them is in the way of the page.
    """
    outputs = [output for step in steps for output in step.makes]
    in_the_way = next((output for output in outputs if related(page, output)), None)
    if in_the_way is not None:
        raise UsageError(f"--html {page}: {in_the_way} of the recipe is in the way", "Choose another name.")
    here = Path.cwd()
    try:
        common = Path(os.path.commonpath([(here / output).parent for output in outputs]))
    except ValueError:  # nothing is written, or it goes to several drives
        common = here.parent
    if here.is_relative_to(common) and here != common:
        raise UsageError(
            "--html: the outputs of the recipe lie in no one folder", "Let its steps write into one folder."
        )
    folder = common.relative_to(here) if common.is_relative_to(here) else common
    given = [path for step in steps for path in step.inputs if not any(related(path, out) for out in outputs)]
    originals = [path for path in given if (path / "config.json").is_file()]
    models = [model for step in steps for model in step.models]
    named = dict.fromkeys([*map(str, originals), *map(str, models)])
    return Step(
        name=f"--html {page}",
        command="report",
        arguments=(
            *(word for name in named for word in ("--original", name)),
            *("--output", str(page), "--", str(folder)),
        ),
        inputs=(*outputs, *dict.fromkeys(originals)),
        models=tuple(dict.fromkeys(models)),
        outputs=(page,),
        accepts=frozenset({"force", "quiet"}),
    )
