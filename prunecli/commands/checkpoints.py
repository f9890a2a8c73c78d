"""The checkpoints that an argument names, and what is taken where none does: the bundled demos, their text."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

from prunecli import demo as bundled
from prunecli.commands import console
from prunecli.commands.command import OutputOptions
from prunecli.options import CheckpointPath, argument, option, text_option
from prunecli.text.choice import TaskName, TextChoice, split_option
from prunecli.text.files import TextFile, is_hub_data, names_of, parse_hub_data

Texts = TypeVar("Texts", bound=TextChoice)

DemoName = Literal["translation", "lm"]

CHECKPOINT = argument(
    "Directory or hub model (org/name). Default: the demo.",
    "CHECKPOINT",
    role="checkpoint",
)
"""Field `checkpoint` of commands for one model."""
DEMO = text_option(
    "Bundled model and text: translation, or lm, a language model.",
    "translation",
    flag="--demo",
    recorded=False,
)
"""Field `demo_model` of commands for both kinds of model."""
TASK = option("Task. Default: that of the model.")
"""Field `task`."""


class ModelsOptions(OutputOptions, TextChoice):
    """Options of the commands that measure several models on the same text."""

    checkpoints: tuple[CheckpointPath, ...] = argument(
        "Directories or hub models (org/name), baseline first.", "CHECKPOINT", (), role="checkpoint"
    )
    split: str = split_option("Split of --data.", "test")
    task: TaskName | None = TASK
    demo_model: DemoName = DEMO

    def with_text(self, given: Sequence[TextFile]) -> Self:
        """The options with the files `given`, or else with the demo's text for its own models."""
        files = texts_or_demo(given, self.demo_model, "test", self.checkpoints)
        return self.updated(
            files=tuple(file.path for file in files),
            names=names_of(files) if any(file.name is not None for file in files) else (),
            whole_files=reads_whole(self, is_demo=bool(files) and not given),
            demo=demo_text(self.checkpoints),
        )


def checkpoint_directory(given: Path) -> Path:
    """The directory of a checkpoint that the user named: fetched from the hub or converted, if need be.

    Raises:
        PruneError: as `prunecli.model.conversion.checkpoint_directory`.
    """
    from prunecli.model import conversion

    bars = not console.is_hushed()
    return conversion.checkpoint_directory(
        given, say=console.note, progress=console.progress(has_bars=True), bars=bars
    )


def checkpoint_or_demo(given: Path | None, demo: DemoName = "translation") -> Path:
    """The directory of `given`, or the bundled demo model, said in one line."""
    if given is not None:
        return checkpoint_directory(given)
    console.note(f"No checkpoint given: using the {_NAMES[demo]}.")
    return _bundled(demo)


def checkpoints_or_demo(given: Sequence[Path] | None, demo: DemoName = "translation") -> list[Path]:
    """Return the given checkpoints, or else the bundled demo model and `checkpoints_here`."""
    if given:
        return [checkpoint_directory(path) for path in given]
    here = checkpoints_here(demo)
    beside = f" with {', '.join(map(str, here))}" if here else ""
    console.note(f"No checkpoint given: using the {_NAMES[demo]}{beside}.")
    return [_bundled(demo), *here]


def checkpoints_here(demo: DemoName = "translation") -> list[Path]:
    """The checkpoints of the working directory that prunecli made from a bundled model."""
    from prunecli.model.history import made_from, written_checkpoints

    here = (path.relative_to(Path.cwd()) for path in written_checkpoints(Path.cwd()))
    return [path for path in here if made_from(path, _bundled(demo))]


def demo_text(checkpoints: Path | Sequence[Path] | None, demo: DemoName = "translation") -> Path | None:
    """The directory of a demo's text, for its model and those made from it; None: other models need text of their own.

    Args:
        checkpoints: that the user named; none: the bundled model is meant.
    """
    from prunecli.model.history import made_from

    named = (checkpoints,) if isinstance(checkpoints, Path) else checkpoints or ()
    if not all(made_from(path, _bundled(demo)) for path in named):
        return None
    return bundled.LM_DATA if demo == "lm" else bundled.DATA


def with_demo_text(options: Texts, checkpoints: Path | Sequence[Path] | None) -> Texts:
    """Return the options with the demo's text, which is read if they name none; see `demo_text`."""
    return options.updated(demo=demo_text(checkpoints))


def reads_whole(options: TextChoice, *, is_demo: bool) -> bool | None:
    """Return whether each file is one text: as asked; if None, the task decides.

    Args:
        is_demo: whether the files are the demo's, in which each line is a text.
    """
    return False if is_demo and options.whole_files is None else options.whole_files


def texts_or_demo(
    given: Sequence[TextFile] | None,
    demo: DemoName,
    split: str,
    checkpoints: Path | Sequence[Path] | None,
) -> tuple[TextFile, ...]:
    """The files of `given`; else, with `--demo lm`, that demo's text. It, and data sets of the hub, are said.

    Args:
        split: of the demo's text, val or test.
        checkpoints: see `demo_text`.
    """
    for path in (file.path for file in given or () if is_hub_data(file.path)):
        console.note(f"Streaming {parse_hub_data(path)} from the hub.")
    if given or demo != "lm" or demo_text(checkpoints, demo) is None:
        return tuple(given or ())
    console.note(
        f"No `files` given: using the demo's text, {' and '.join(bundled.LM_TEXTS)}; give yours with `files`."
    )
    return tuple(TextFile(bundled.LM_DATA / f"{split}.{name}", name) for name in bundled.LM_TEXTS)


_NAMES = {"translation": "bundled demo model", "lm": "bundled language model"}


def _bundled(demo: DemoName) -> Path:
    return bundled.LM_CHECKPOINT if demo == "lm" else bundled.CHECKPOINT


def ask_huge_pages() -> None:
    """Have torch ask for huge pages, of which it takes note at its first tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
