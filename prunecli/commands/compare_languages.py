"""`prunecli compare-languages`: which languages, or texts of language models, use the same experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.commands.command import command
from prunecli.commands.language_tables import TABLE_PAIRS, plot_languages, show_languages
from prunecli.commands.outputs import OutputOptions
from prunecli.commands.text_tables import plot_texts, show_texts
from prunecli.errors import StatisticsError, UsageError
from prunecli.methods.options import Balance, Strategy
from prunecli.options import ADVANCED, SELECTION, Share, argument, option

if TYPE_CHECKING:
    from prunecli.results.document import Document


class CompareLanguages(OutputOptions):
    """Options of the command."""

    gates: tuple[Path, ...] = argument(
        (Path("gates.json"),), "Gate statistics. Default: ./gates.json.", "GATES.json", role="input"
    )
    ratio: Share = option(
        0.75, "Fraction of the experts removed, in [0, 1), such as 0.75 or 75%.", metavar="R"
    )
    output: Path = option(
        Path(),
        "File of the result. Default: languages.json; for texts texts.json.",
        flag="--output -o",
        role="output",
    )
    langs: tuple[str, ...] = option(
        (), "Languages: all pairs between them.", metavar="A,B,C", panel=SELECTION
    )
    texts: tuple[str, ...] = option(
        (), "Language models: texts to compare. Default: all.", flag="--for", metavar="A,B", panel=SELECTION
    )
    metric: str | None = option(
        None,
        "Metric of the experts, as in prune-experts. Default: importance; for language models reap.",
        metavar="NAME",
        panel=SELECTION,
    )
    strategy: Strategy | None = option(
        None,
        "How experts are selected: side-threshold, global-threshold, per-layer. Default: side-threshold; for texts "
        "per-layer.",
        panel=SELECTION,
    )
    balance: Balance | None = option(
        None, "Encoder experts per decoder expert. Default: 1:1.", metavar="E:D", panel=SELECTION
    )
    least: int | None = option(
        None,
        "Number of experts that every layer keeps. Default: 4; for texts the router's top-k.",
        flag="--min",
        panel=SELECTION,
        ge=1,
    )
    linkage: str = option(
        "ward", "How clusters of languages join: ward, average, complete, single.", panel=ADVANCED
    )
    layer_metric: str | None = option(
        None,
        "Metric of the experts per layer, such as top1 in Figure 1 of the paper. Default: that of --metric.",
        metavar="NAME",
        panel=ADVANCED,
    )
    groups: Path | None = option(
        None,
        "Also experts of each side by group of languages: a language, a tab and its group on each line, or {language: "
        "group} in .json.",
        panel=ADVANCED,
        role="input",
    )
    families: Path | None = option(
        None,
        "Colours of the trees in --plot and the report: a language, a tab and its family on each line, or .json.",
        panel=ADVANCED,
        role="input",
    )


@command(CompareLanguages)
def compare_languages(options: CompareLanguages) -> None:
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

    files = options.gates
    if "gates" not in options.model_fields_set and not files[0].is_file():
        raise StatisticsError(
            "gates.json: no such file", "Name a statistics file, or make it: prunecli collect-gates."
        )
    method = parse_linkage(options.linkage)
    statistics = merge([read_gates(path) for path in files], [str(path) for path in files])
    is_text = statistics.mode == "text"
    if options.output == Path():
        default = Path("texts.json" if is_text else "languages.json")
        options = options.model_copy(update={"output": default})
    options.check_outputs()
    names = [path.name for path in files]
    if statistics.mixed:
        console.note(MIXED)
    result: Document
    leave_out: tuple[str, ...] = ()
    if is_text:
        for name in ("strategy", "balance", "langs", "layer_metric", "groups"):
            if name in options.changed and getattr(options, name) != "per-layer":
                raise UsageError(
                    f"`{name}` is for translation; these statistics are of texts.",
                    "`texts` chooses among the texts.",
                )
        if options.metric is not None:
            metric_named(options.metric)
        colours = {} if options.families is None else read_groups(options.families)
        asked = TextOptions(options.ratio, options.metric, options.least, method, options.texts, colours)
        result = found = compare_by_text(statistics, asked, names)
        show = partial(show_texts, found)
        if options.plot is not None:
            plot_texts(options.plot, found)
    else:
        if options.texts:
            raise UsageError(
                "`texts` names texts of language models; these statistics are by pairs of languages.",
                "Name languages with `langs`.",
            )
        chosen = language_options(
            ratio=options.ratio,
            metric=options.metric,
            strategy=options.strategy,
            balance=options.balance,
            minimum=options.least,
            linkage=method,
            languages=options.langs,
            layer_metric=options.layer_metric,
            groups=options.groups,
            families=options.families,
        )
        result = languages = compare_by_language(statistics, chosen, names)
        show = partial(show_languages, languages)
        if len(languages.pairs) > TABLE_PAIRS:
            leave_out = ("similarity",)
        if options.plot is not None:
            similarity = languages.similarity
            if similarity is None:
                matrices = None
            elif similarity.encoder is None or similarity.decoder is None:
                matrices = similarity_matrices(statistics, chosen, languages.pairs)
            else:
                matrices = {
                    "encoder": np.array(similarity.encoder),
                    "decoder": np.array(similarity.decoder),
                }
            plot_languages(options.plot, languages, matrices)
    options.write(result, leave_out)
    options.show(result.to_json, show)
