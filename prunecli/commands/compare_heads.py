"""`prunecli compare-heads`: whether the same heads matter on two texts or tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.commands import console
from prunecli.commands.command import OutputOptions, command, plot_option, result_option
from prunecli.errors import UsageError
from prunecli.options import argument

if TYPE_CHECKING:
    from prunecli.results.similarity import HeadComparison


FORMS = ("3f", "2g", "3f", "2g")
"""Decimal places of r and p, of both correlations."""


class CompareHeads(OutputOptions):
    """Options of the command."""

    first: Path = argument(..., "Scores of heads, from score-heads.", "A.json", role="input")
    second: Path = argument(..., "Scores of the same heads on another text or task.", "B.json", role="input")
    output: Path = result_option("head-comparison.json")
    plot: Path | None = plot_option("Also draw a point for each head")


@command(CompareHeads)
def compare_heads(options: CompareHeads) -> None:
    """Compare the importance of heads on two texts or tasks.

    Correlations of all heads and of each kind of attention: Pearson's of the values, Spearman's of their ranks.
    """
    from prunecli.results.unit_scores import read_scores

    first, second = options.first, options.second
    if first.resolve() == second.resolve():
        raise UsageError(f"{first} is given twice", "Name the scores on two texts or tasks.")
    scores = read_scores(first), read_scores(second)
    options.check_outputs()

    from prunecli.analysis.head_importance import compare_heads as compare

    same_name = first.name == second.name
    comparison = compare(scores, (str(first), str(second)) if same_name else (first.name, second.name))
    options.write(comparison)
    if options.plot is not None:
        from prunecli.report.pictures import head_comparison
        from prunecli.report.render import save_pictures

        save_pictures([[head_comparison(comparison)]], options.plot)
    options.show(comparison.to_json, lambda: _show(comparison))


def _show(comparison: HeadComparison) -> None:
    rows = []
    for one in comparison.correlations:
        values = one.pearson, one.pearson_p, one.spearman, one.spearman_p
        texts = [
            "-" if value is None else f"{value:.{form}}" for value, form in zip(values, FORMS, strict=True)
        ]
        rows.append([one.of, f"{one.heads:,}", *texts])
    title = f"Importance of heads, {comparison.first.file} and {comparison.second.file}"
    console.table(title, ["attention", "heads", "Pearson r", "p", "Spearman r", "p"], rows)
    if comparison.left_out:
        console.out(f"Heads that only one of the two has are left out: {comparison.left_out:,}.")
    fingerprints = {model.fingerprint for model in comparison.models}
    if len(fingerprints) > 1:
        console.out("The scores are of two models: heads are compared by name and original number.")
