"""The page of all that a recipe made, as its last step."""

from __future__ import annotations

from pathlib import Path

import pytest

from prunecli.errors import UsageError
from prunecli.recipes.engine import Step
from prunecli.recipes.run import page_step
from tests.recipes.example import resolved


def test_it_reads_what_the_steps_write_and_names_the_checkpoints_they_began_with(workplace):
    step = page_step(resolved(workplace).steps, Path("page.html"))
    assert (step.command, step.outputs) == ("report", (Path("page.html"),))
    # `text`, which the first step reads as well, is no checkpoint.
    assert step.arguments == ("--original", "base", "--output", "page.html", "--", "made")
    made = [Path("made") / name for name in ("gates.json", "language", "global", "evaluation.json")]
    assert step.inputs == (*made, Path("base"))


@pytest.mark.parametrize("page", ["made", "made/language", "made/language/page.html"])
def test_what_is_in_the_way_is_named(workplace, page):
    with pytest.raises(UsageError, match=r"html=.*made/.* of the recipe is in the way"):
        page_step(resolved(workplace).steps, Path(page))


@pytest.mark.parametrize("outputs", [(), ("/elsewhere/a", "made")])
def test_outputs_in_no_one_folder_are_refused(workplace, outputs):
    with pytest.raises(UsageError, match="in no one folder"):
        page_step([Step("a", "prune", (), outputs=tuple(map(Path, outputs)))], Path("page.html"))
