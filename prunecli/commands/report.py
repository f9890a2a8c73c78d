"""`prunecli report`: one page of everything that a directory holds."""

from pathlib import Path

import typer

import prunecli
from prunecli.commands import console
from prunecli.commands.command import FORCE, QUIET, command
from prunecli.options import CheckpointPath, Options, argument, option
from prunecli.tensors.documents import refuse_unwritable

STDOUT = Path("-")


class Report(Options):
    """Options of the command."""

    directory: Path = argument(
        "Directory of results and checkpoints. Default: this one.", "DIR", Path(), role="input"
    )
    originals: tuple[CheckpointPath, ...] = option(
        "Checkpoint elsewhere that a result or a history names, to be shown there; may be given again.",
        (),
        flag="--original",
        metavar="CHECKPOINT",
        role="checkpoint",
    )
    output: Path = option("The page; - for stdout.", Path("report.html"), flag="--output -o", role="output")
    force: bool = FORCE
    quiet: bool = QUIET


@command(Report)
def report(options: Report) -> None:
    """Make one self-contained page of the results and checkpoints in a directory.

    History, size, quality, speed, experts, heads, languages, similarity, training: whatever is there. No model is
    loaded, nothing is fetched, and the page opens without a network.
    """
    from prunecli.report.collect import collect
    from prunecli.report.page import report_page
    from prunecli.tensors.quantities import counted
    from prunecli.tensors.transaction import new_file

    output = options.output
    if output != STDOUT:
        refuse_unwritable(output, force=options.force)
    bundled = {"demo": prunecli.demo.CHECKPOINT, "demo-lm": prunecli.demo.LM_CHECKPOINT}
    if options.originals:
        from prunecli.evaluation.options import labels_for  # imports torch

        bundled |= labels_for(options.originals)
    data = collect(options.directory, bundled, console.progress())
    for name, reason in data.unreadable.items():
        console.warn(f"Unreadable, left out: {name}: {reason}")
    page = report_page(data)
    if output == STDOUT:
        typer.echo(page, nl=False)
    else:
        with new_file(output) as partial:
            partial.write_text(page, encoding="utf-8", newline="\n")
        checkpoints = counted(len(data.checkpoints), "checkpoint")
        results = counted(len(data.documents), "result file")
        console.note(f"{checkpoints}, {results}. Written to {output}.")
