"""Options of commands that run a model on text: which text, in which batches, on which device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.commands.checkpoints import demo_text
from prunecli.commands.groups import Without
from prunecli.commands.options import (
    BatchTokensOption,
    ContextOption,
    DataOption,
    DeviceOption,
    LabelledOption,
    LangsOption,
    MaxSentencesOption,
    PairsOption,
    SourceFileOption,
    SplitOption,
    TargetFileOption,
    TextFilesOption,
    WholeFilesOption,
)

if TYPE_CHECKING:
    from prunecli.evaluation.on_text import RunOptions
    from prunecli.text.choice import TextChoice

UNLABELLED = Without({"source_file", "target_file", "labelled"})
"""For commands that read parallel text of a directory, or plain text."""


@dataclass(frozen=True)
class TextOptions:
    """The options that name text, and how a model runs on this text."""

    data: DataOption = None
    split: SplitOption = "val"
    source_file: SourceFileOption = None
    target_file: TargetFileOption = None
    langs: LangsOption = None
    pairs: PairsOption = None
    text: TextFilesOption = None
    whole_files: WholeFilesOption = None
    labelled: LabelledOption = None
    context: ContextOption = None
    max_sentences: MaxSentencesOption = None
    batch_tokens: BatchTokensOption = 4096
    device: DeviceOption = "auto"

    def choice(self, checkpoints: Path | Sequence[Path] | None, **own: Any) -> TextChoice:
        """Return the text that is named; if none is, the demo's, see `demo_text`.

        Args:
            own: values of `TextChoice` that differ from those of the options.
        """
        from prunecli.text.choice import TextChoice

        choice = TextChoice(
            data=self.data,
            split=self.split,
            source_file=self.source_file,
            target_file=self.target_file,
            langs=self.langs,
            pairs=self.pairs,
            files=tuple(self.text or ()),
            whole_files=self.whole_files,
            labelled=self.labelled,
            max_sentences=self.max_sentences,
            context=self.context,
            demo=demo_text(checkpoints),
        )
        return replace(choice, **own)

    def reads_whole(self, *, is_demo: bool) -> bool | None:
        """Return whether each file is one text: as asked; if None, the task decides.

        Args:
            is_demo: whether the files are the demo's, in which each line is a text.
        """
        return False if is_demo and self.whole_files is None else self.whole_files

    @property
    def running(self) -> RunOptions:
        """Return how the model runs on the text."""
        from prunecli.evaluation.on_text import RunOptions

        return RunOptions(self.batch_tokens, self.device)
