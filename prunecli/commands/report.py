"""`prunecli report`: one page of everything that a directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prunecli.commands import console
from prunecli.commands.options import ForceOption, QuietOption, refuse_absent
from prunecli.commands.outputs import Outputs
from prunecli.errors import UsageError
from prunecli.tensors.hub.names import checkpoint_path

STDOUT = Path("-")


def report(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Directory of results and checkpoints; default: this one.",
        ),
    ] = None,
    originals: Annotated[
        list[Path] | None,
        typer.Option(
            "--original",
            metavar="CHECKPOINT",
            parser=checkpoint_path,
            callback=refuse_absent,
            help="Checkpoint that lies elsewhere, shown where a result or a history speaks of it; may be given again.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page; - for stdout. Default: report.html; none with --json.",
        ),
    ] = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the collected facts as JSON.")] = False,
) -> None:
    """Make one self-contained page of the results and checkpoints in a directory.

    History, size, quality, speed, experts, heads, languages, similarity, training: whatever is there. No model is
    loaded, nothing is fetched, and the page opens without a network.
    """
    from prunecli import demo
    from prunecli.report.collect import collect, require_directory
    from prunecli.report.facts import facts
    from prunecli.report.page import report_page
    from prunecli.tensors.quantities import counted
    from prunecli.tensors.transaction import new_file

    directory = directory or Path()
    require_directory(directory)
    if output is None and not json:
        output = Path("report.html")
    if output == STDOUT and json:
        raise UsageError("-o - and --json were both given: each writes to stdout", "Leave one of them out.")
    if output not in (None, STDOUT):
        Outputs(output=output, force=force).check()
    bundled = {"demo": demo.CHECKPOINT, "demo-lm": demo.LM_CHECKPOINT}
    data = collect(directory, bundled | _labelled(originals), console.progress(quiet))
    for one in data.unreadable:
        console.warn(f"Unreadable, left out: {one.name}: {one.reason}")
    if json:
        console.print_json(facts(data))
    if output == STDOUT:
        typer.echo(report_page(data), nl=False)
    elif output is not None:
        page = report_page(data)
        with new_file(output) as partial:
            partial.write_text(page, encoding="utf-8", newline="\n")
        checkpoints = counted(len(data.checkpoints), "checkpoint")
        results = counted(len(data.documents), "result file")
        if not quiet:
            console.note(f"{checkpoints}, {results}. Written to {output}.")


def _labelled(originals: list[Path] | None) -> dict[str, Path]:
    if not originals:
        return {}
    from prunecli.evaluation.options import labels_for  # imports torch

    return labels_for(originals)
