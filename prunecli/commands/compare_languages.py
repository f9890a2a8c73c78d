"""`prunecli compare-languages`: which languages, or texts of language models, use the same experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prunecli.commands import console
from prunecli.commands.groups import Without, flattened
from prunecli.commands.language_tables import TABLE_PAIRS, plot_languages, show_languages
from prunecli.commands.options import (
    LangsOption,
)
from prunecli.commands.outputs import Outputs
from prunecli.commands.text_tables import plot_texts, show_texts
from prunecli.errors import StatisticsError, UsageError
from prunecli.tensors.quantities import parse_names, parse_share

if TYPE_CHECKING:
    from prunecli.results.document import Document


@flattened
def compare_languages(
    gates: Annotated[
        list[Path] | None,
        typer.Argument(metavar="GATES.json", help="Gate statistics; default: ./gates.json."),
    ] = None,
    ratio: Annotated[
        float,
        typer.Option(
            parser=parse_share,
            metavar="R",
            help="Fraction of the experts removed, in [0, 1), such as 0.75 or 75%.",
        ),
    ] = 0.75,
    metric: Annotated[
        str | None,
        typer.Option(
            help="As of prune-experts. Default: importance; of language models reap.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="What selects these sets: side-threshold (default), global-threshold, per-layer; of texts per-layer "
            "alone.",
        ),
    ] = None,
    balance: Annotated[
        str | None,
        typer.Option(
            help="Encoder experts to decoder experts in these sets. Default: 1:1.",
            metavar="E:D",
        ),
    ] = None,
    least: Annotated[
        int | None,
        typer.Option(
            "--min",
            min=1,
            help="Experts that every layer keeps. Default: 4; of texts what the router picks for a token.",
        ),
    ] = None,
    linkage: Annotated[
        str,
        typer.Option(help="How clusters of languages join: ward, average, complete, single."),
    ] = "ward",
    langs: LangsOption = None,
    texts: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="A,B",
            help="Of language models: the texts that are compared; default: all.",
        ),
    ] = None,
    layer_metric: Annotated[
        str | None,
        typer.Option(
            help="Metric of the experts per layer, such as top1 in the paper's Figure 1; default: that of --metric.",
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            help="Experts of each side by group of languages too, such as resource classes: a language, a tab and its "
            "group a line, or {language: group} in .json.",
            metavar="FILE",
        ),
    ] = None,
    families: Annotated[
        Path | None,
        typer.Option(
            help="Colours of the trees in --plot and the report: a language, a tab and its family a line, or .json.",
            metavar="FILE",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The result. Default: languages.json; of texts texts.json.",
        ),
    ] = None,
    outputs: Annotated[Outputs, Without({"output"})] = Outputs(output=Path("languages.json")),
) -> None:
    """Compare languages by the experts that they use, or texts by those of a language model.

    Shows how alike the experts are that language pairs with a common source or target select, which languages
    have like importance vectors, and how many experts each layer keeps under a global threshold. Of texts: how alike
    the experts are that they select, and which are those of one alone.
    """
    import numpy as np

    from prunecli.analysis.language_comparison import (
        compare_by_language,
        language_options,
        similarity_matrices,
    )
    from prunecli.analysis.language_experts import parse_linkage
    from prunecli.analysis.text_comparison import TextOptions, compare_by_text
    from prunecli.methods.experts.metrics import metric_named
    from prunecli.results.gates import merge, read_gates
    from prunecli.text.parallel import read_groups
    from prunecli.text.plain import MIXED

    files = gates or [Path("gates.json")]
    if not gates and not files[0].is_file():
        raise StatisticsError(
            "gates.json: no such file", "Name a statistics file, or make it: prunecli collect-gates."
        )
    method = parse_linkage(linkage)
    statistics = merge([read_gates(path) for path in files], [str(path) for path in files])
    is_text = statistics.mode == "text"
    outputs = replace(outputs, output=output or Path("texts.json" if is_text else "languages.json"))
    outputs.check()
    names = [path.name for path in files]
    if statistics.mixed:
        console.note(MIXED)
    result: Document
    leave_out: tuple[str, ...] = ()
    if is_text:
        of_translation = {
            "--strategy": strategy not in (None, "per-layer"),
            "--balance": balance is not None,
            "--langs": langs is not None,
            "--layer-metric": layer_metric is not None,
            "--groups": groups is not None,
        }
        for option, is_given in of_translation.items():
            if is_given:
                raise UsageError(
                    f"{option} is of translation; these statistics are of texts.",
                    "--for chooses among the texts.",
                )
        if metric is not None:
            metric_named(metric)
        chosen = parse_names("--for", texts)
        colours = {} if families is None else read_groups(families)
        result = found = compare_by_text(
            statistics, TextOptions(ratio, metric, least, method, chosen, colours), names
        )
        show = partial(show_texts, found)
        if outputs.plot is not None:
            plot_texts(outputs.plot, found)
    else:
        if texts is not None:
            raise UsageError(
                "--for names texts of language models; these statistics are by pairs of languages.",
                "Name languages with --langs.",
            )
        options = language_options(
            ratio=ratio,
            metric=metric,
            strategy=strategy,
            balance=balance,
            minimum=least,
            linkage=method,
            languages=langs,
            layer_metric=layer_metric,
            groups=groups,
            families=families,
        )
        result = languages = compare_by_language(statistics, options, names)
        show = partial(show_languages, languages)
        if len(languages.pairs) > TABLE_PAIRS:
            leave_out = ("similarity",)
        if outputs.plot is not None:
            similarity = languages.similarity
            if similarity is None:
                matrices = None
            elif similarity.encoder is None or similarity.decoder is None:
                matrices = similarity_matrices(statistics, options, languages.pairs)
            else:
                matrices = {
                    "encoder": np.array(similarity.encoder),
                    "decoder": np.array(similarity.decoder),
                }
            plot_languages(outputs.plot, languages, matrices)
    outputs.write(result, leave_out)
    outputs.show(result.to_json, show)
