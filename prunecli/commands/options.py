"""Option types that several commands share, so that one thing has one name, one help text, one default."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from prunecli.choices import Choices
from prunecli.errors import DataError, UsageError
from prunecli.methods.sharing.options import Order
from prunecli.tensors.hub.names import checkpoint_path, hub_name, no_such_directory
from prunecli.tensors.quantities import parse_share
from prunecli.text.files import TextFile, is_hub_data, parse_text_file
from prunecli.text.tasks import TaskName, TrainingTask

if TYPE_CHECKING:
    from prunecli.results.unit_scores import Scores


def written_dtype(text: str) -> str:
    """Type of written weights."""
    from prunecli.tensors.dtypes import parse_computed

    return parse_computed(text)


def computed_dtype(text: str) -> str:
    """Type to compute in."""
    from prunecli.tensors.dtypes import parse_computed

    return parse_computed(text, also=("auto",))


def running_dtype(text: str) -> str:
    """Type to compute in, of a model that only runs forward."""
    from prunecli.tensors.dtypes import parse_computed

    return parse_computed(text, also=("auto", "int8"))


def refuse_absent(given: Path | Sequence[Path] | None) -> Path | Sequence[Path] | None:
    """Checkpoints that the user names, as they are.

    Raises:
        CheckpointError: one is a path that leads nowhere, which is said before anything else is looked at.
    """
    for path in (given,) if isinstance(given, Path) else given or ():
        if hub_name(path) is None and not path.exists():
            raise no_such_directory(path)
    return given


def refuse_absent_text(
    param: typer.CallbackParam, given: Path | TextFile | Sequence[Path | TextFile] | None
) -> Path | TextFile | Sequence[Path | TextFile] | None:
    """Return the text that the user names, before a model is loaded for this text.

    Raises:
        DataError: a file or directory does not exist.
    """
    for each in given if isinstance(given, Sequence) else (given,):
        path = each.path if isinstance(each, TextFile) else each
        if path is not None and not is_hub_data(path) and not path.exists():
            kind = "directory" if param.name == "data" else "file"
            raise DataError(f"{path}: no such {kind}", f"Name a {kind} that exists with {param.opts[0]}.")
    return given


CheckpointArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="CHECKPOINT",
        parser=checkpoint_path,
        callback=refuse_absent,
        help="Checkpoint directory, or a hub model (org/name); default: the bundled demo model.",
    ),
]
CheckpointsArgument = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="CHECKPOINT",
        parser=checkpoint_path,
        callback=refuse_absent,
        help="Checkpoint directories or hub models (org/name), the baseline first.",
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        callback=refuse_absent_text,
        help="Directory of aligned text: SPLIT.LANG (val.eng_Latn) or FLORES-200's SPLIT/LANG.SPLIT, or "
        "these with .gz; default: the demo's text.",
    ),
]
SourceFileOption = Annotated[
    Path | None,
    typer.Option(
        callback=refuse_absent_text,
        help="Source sentences of one pair, one a line; with --target-file and --pairs.",
    ),
]
TargetFileOption = Annotated[
    Path | None,
    typer.Option(callback=refuse_absent_text, help="Target sentences of one pair, one a line."),
]
LangsOption = Annotated[
    str | None,
    typer.Option(help="Languages, comma-separated: all pairs between them.", metavar="A,B,C"),
]
PairsOption = Annotated[
    str | None,
    typer.Option(help="Language pairs, comma-separated.", metavar="A-B,C-D"),
]
TextFilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        callback=refuse_absent_text,
        help="File of plain text; may be given again.",
        metavar="FILE",
    ),
]
NamedTextOption = Annotated[
    list[TextFile] | None,
    typer.Option(
        callback=refuse_absent_text,
        parser=parse_text_file,
        help="File of plain text, or hf://ORG/NAME:SPLIT[:1000]:COLUMN; may be given again. With NAME= what is "
        "measured is told apart by name.",
        metavar="[NAME=]FILE",
    ),
]
WholeFilesOption = Annotated[
    bool | None,
    typer.Option(
        "--whole-files/--lines",
        help="Each --text file is one document, cut into windows of --context, or each of its lines is a text. "
        "Default: whole files for causal language models, lines for all others.",
    ),
]
LabelledOption = Annotated[
    Path | None,
    typer.Option(
        callback=refuse_absent_text,
        help="Labelled text: label, tab, text, perhaps a tab and a second text; or JSON lines (label, text, text_b).",
        metavar="FILE",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Plain text: tokens of a window. Default: what the model takes, 2,048 at most.",
    ),
]
_TASK = typer.Option("--task", help="What for; default: what the model is for.")
TaskOption = Annotated[TaskName | None, _TASK]
TrainingTaskOption = Annotated[TrainingTask | None, _TASK]
BatchTokensOption = Annotated[
    int, typer.Option(min=1, help="Padded tokens in a batch; less takes less memory.")
]
SplitOption = Annotated[str, typer.Option(help="Split of the text.")]
DenseOnlyOption = Annotated[
    bool, typer.Option("--dense-only", help="Leave mixtures of experts as they are, instead of refusing.")
]
SideName = Literal["encoder", "decoder"]
OrderOption = Annotated[
    Order | None,
    typer.Option(
        help="Which layers share one, of six in three groups: 1 1 2 2 3 3, 1 2 3 1 2 3, or 1 2 3 3 2 1. Default: "
        "sequence.",
    ),
]
MaxSentencesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Use only the first N sentences; of --text the first N lines, with --whole-files too.",
    ),
]
AllOption = Annotated[
    bool,
    typer.Option(
        "--all", help="If no checkpoint is named: measure on all of the demo's text, however long that takes."
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto (a GPU where there is one; layers over all of them where one does not hold the model), cpu, cuda, "
        "cuda:1, …",
    ),
]
ComputeDtypeOption = Annotated[
    str,
    typer.Option(
        parser=computed_dtype,
        help="Type to compute in: auto, float32, bfloat16, float16.",
        metavar="TYPE",
    ),
]
RunningDtypeOption = Annotated[
    str,
    typer.Option(
        parser=running_dtype,
        help="Type to compute in: auto, float32, bfloat16, float16; int8 (on a CPU).",
        metavar="TYPE",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        parser=written_dtype,
        help="Type of the written weights: float16, bfloat16, float32; default: as stored.",
        metavar="TYPE",
    ),
]
FitBatchOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="For --fit: sentences or texts decoded at a time. Default: 1.",
    ),
]
FitBeamOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="For --fit: beam size. Default: 4, of language models 1.",
    ),
]
FitLengthOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="For --fit: tokens of a sentence. Default: 128; of language models 4,096, or all their positions.",
    ),
]
TableOption = Annotated[
    Path | None,
    typer.Option(
        help="Also write the tables, unrounded; the ending says how: .csv, .md, .tex.",
        metavar="FILE",
    ),
]
SeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output that exists.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")]
StreamOption = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Of a model of the hub (org/name): read by ranges what the result takes of its weights; the rest is not "
        "fetched, and nothing of it kept. A run that was ended goes on.",
    ),
]
CheckOption = Annotated[
    Path | None,
    typer.Option(
        help="Text to measure the loss on before and after (some 2,000 tokens of it): a file of plain text, or for a "
        "model that translates a directory like that of --data. Default: where scores come from text, text like it.",
        metavar="TEXT",
    ),
]
ConfigOnlyOption = Annotated[
    bool,
    typer.Option(
        "--config-only",
        help="Write the result without its weights: what finetune --from-scratch trains from random ones.",
    ),
]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain", help="Also show by what was chosen what stays: values, ranks, where each place was cut."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No notes, no progress, no table.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

Options = TypeVar("Options", bound=Choices)


@dataclass(frozen=True)
class SelectionOptions:
    """The options of every pruning command that say which units are removed; a command may lack some of them."""

    ratio: Annotated[
        float | None,
        typer.Option(parser=parse_share, metavar="R", help="Fraction of the units to remove, rounded up."),
    ] = None
    count: Annotated[
        int | None, typer.Option(min=0, help="Number of units to remove, instead of --ratio.")
    ] = None
    keep: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ids of the units to keep: what --dry-run --json printed."),
    ] = None
    least: Annotated[
        int | None, typer.Option("--min", min=0, help="Number of units that each layer keeps at least.")
    ] = None
    multiple_of: Annotated[int, typer.Option(min=1, help="Keep a multiple of N units in each layer.")] = 1
    uniform: Annotated[
        bool,
        typer.Option(
            "--uniform/--uneven", show_default=False, help="Remove the same part of every layer, or not."
        ),
    ] = False
    dtype: DtypeOption = None
    seed: SeedOption = 0

    def of(self, method: type[Options], **own: Any) -> Options:
        """Return the options of a method: those that it has of these, and its own."""
        names = {field.name for field in fields(method)}  # type: ignore[arg-type]
        return method(**{name: value for name, value in vars(self).items() if name in names} | own)


@dataclass(frozen=True)
class ScoreFiles:
    """The options of commands that measure units on text, or take what was measured before."""

    scores: Annotated[
        list[Path] | None,
        typer.Option(
            "--scores",
            metavar="FILE",
            help="What --save-scores wrote, of this checkpoint or of the one that it was pruned from: no text is read. "
            "Several files of one metric are added up.",
        ),
    ] = None
    save_scores: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write what is measured on the text, for --scores; with --dry-run too.",
        ),
    ] = None

    def saver(self, *, measures: bool, force: bool) -> Callable[[Scores], object] | None:
        """Return the function that writes measured scores to --save-scores, if it is given.

        Args:
            measures: whether the command measures anything.
            force: whether an existing file is replaced.

        Raises:
            UsageError: nothing is measured.
            OutputError: the file cannot be written.
        """
        path = self.save_scores
        if path is None:
            return None
        if not measures:
            raise UsageError("--save-scores: nothing is measured on text here.", "Leave it out.")
        from prunecli.tensors.documents import refuse_unwritable, write_json

        refuse_unwritable(path, force=force)
        return lambda scores: write_json(path, scores.to_json(), force=force)


def fit_load(fit: str | None, batch: int | None, beam: int | None, length: int | None) -> dict[str, int]:
    """What of the load that decodes in the memory of `--fit` was chosen.

    Raises:
        UsageError: something was chosen, and there is no `--fit`.
    """
    given = {"batch": batch, "beam": beam, "length": length}
    if fit is None:
        refuse_without_fit({f"--fit-{name}": value is not None for name, value in given.items()})
    return {name: value for name, value in given.items() if value is not None}


def refuse_without_fit(chosen: Mapping[str, bool]) -> None:
    """Refuse what says nothing without `--fit`: option -> whether it was given."""
    for option, is_given in chosen.items():
        if is_given:
            raise UsageError(f"{option} goes with --fit", "Give --fit SIZE, or leave it out.")
