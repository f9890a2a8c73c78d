"""`prunecli compare-languages`: which languages use the same experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from prunecli.commands import console
from prunecli.commands.options import (
    ForceOption,
    JsonOption,
    LangsOption,
    QuietOption,
    TableOption,
    removed_share,
)
from prunecli.commands.outputs import check_outputs, write_table, written
from prunecli.errors import StatisticsError

FORMAT = "prunecli.languages/1"
TABLE_PAIRS = 12
"""With more pairs than this, their similarities are summed up in the terminal, not listed."""


def compare_languages(
    gates: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="GATES.json", help="Gate statistics; default: ./gates.json.", show_default=False
        ),
    ] = None,
    ratio: Annotated[
        float,
        typer.Option(
            "--ratio",
            parser=removed_share,
            metavar="R",
            help="Fraction of the experts removed, in [0, 1), such as 0.75 or 75%.",
        ),
    ] = 0.75,
    metric: Annotated[
        str, typer.Option("--metric", help="importance, importance-vanilla, top1, top2, load-balance.")
    ] = "importance",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", help="What selects these sets: side-threshold, global-threshold, per-layer."
        ),
    ] = "side-threshold",
    balance: Annotated[
        str,
        typer.Option("--balance", help="Encoder experts to decoder experts in these sets.", metavar="E:D"),
    ] = "1:1",
    min_per_layer: Annotated[
        int, typer.Option("--min-per-layer", min=1, help="Experts that every layer keeps.")
    ] = 4,
    linkage: Annotated[
        str,
        typer.Option("--linkage", help="How clusters of languages join: ward, average, complete, single."),
    ] = "ward",
    langs: LangsOption = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw it all.", metavar="FILE.png", show_default=False),
    ] = None,
    table: TableOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The result.")] = Path("languages.json"),
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Compare languages by the experts that they use.

    Shows how alike the experts are that language pairs with a common source or target select, which languages
    have like importance vectors, and how many experts each layer keeps under a global threshold.
    """
    from prunecli.analysis.language_comparison import compare_by_language, language_options
    from prunecli.results.gates import merge
    from prunecli.results.header import header
    from prunecli.results.published import read_gates
    from prunecli.tensors.documents import write_json

    files = gates or [Path("gates.json")]
    if not gates and not files[0].is_file():
        raise StatisticsError(
            "gates.json: no such file", "Name a statistics file, or make it: prunecli collect-gates."
        )
    check_outputs(output, plot, table, force=force)
    options = language_options(
        ratio=ratio,
        metric=metric,
        strategy=strategy,
        balance=balance,
        minimum=min_per_layer,
        linkage=linkage,
        languages=langs,
    )
    statistics = merge([read_gates(path) for path in files], [str(path) for path in files])
    model = {"fingerprint": statistics.fingerprint, "model_type": statistics.model_type}
    payload = {
        **header(FORMAT, [], None),
        "models": [model],
        "statistics": [path.name for path in files],
        **compare_by_language(statistics, options),
    }
    if plot is not None:
        _plot(plot, payload)
    write_json(output, payload, force=force)
    few = len(payload["pairs"]) <= TABLE_PAIRS
    write_table(table, payload, force=force, leave_out=() if few else ("similarity",))
    if json:
        console.print_json(payload)
    elif not quiet:
        _show(payload)
        console.note(written(output, plot, table))


def _show(payload: Mapping[str, Any]) -> None:
    from prunecli.commands import languages_table as tables

    removed = f"{payload['ratio']:.0%} of the experts removed by {payload['metric']}"
    similarity = payload["similarity"]
    if similarity is not None:
        title = f"Jaccard similarity of the selected experts ({removed}, {payload['strategy']})"
        console.show(tables.relations(title, similarity["relations"]))
        if len(payload["pairs"]) <= TABLE_PAIRS:
            console.show(tables.triangles(payload["pairs"], similarity["encoder"], similarity["decoder"]))
        else:
            console.out(
                f"{len(payload['pairs'])} pairs; --langs A,B,C lists those between a few languages.\n"
            )
    elif payload["pairs"]:
        console.out(f"{len(payload['pairs'])} pairs are too many to compare; --langs A,B,C chooses some.\n")
    for side, by in (("encoder", "source"), ("decoder", "target")):
        found = payload["clustering"][side]
        if found is not None:
            console.out(f"Clusters of languages, {side} by {by} ({payload['clustering']['linkage']} linkage)")
            console.out("\n".join(tables.tree(found["clusters"])) + "\n")
    if payload["experts_per_layer"] is not None:
        console.show(tables.experts(removed, payload["experts_per_layer"]))


def _plot(path: Path, payload: Mapping[str, Any]) -> None:
    import numpy as np

    from prunecli.analysis.plots import languages_figure, save_figure
    from prunecli.analysis.similarity import two_triangles

    titles = {
        "encoder": "Encoder experts, by source language",
        "decoder": "Decoder experts, by target language",
    }
    trees = {
        title: (payload["clustering"][side]["languages"], np.array(payload["clustering"][side]["matrix"]))
        for side, title in titles.items()
        if payload["clustering"][side] is not None
    }
    layers, similarity = payload["experts_per_layer"], payload["similarity"]
    figure = languages_figure(
        trees,
        None if layers is None else (layers["layers"], layers["mean"]),
        None
        if similarity is None
        else (
            payload["pairs"],
            two_triangles(np.array(similarity["encoder"]), np.array(similarity["decoder"])),
        ),
    )
    save_figure(figure, path)
