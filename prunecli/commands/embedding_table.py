"""What `factorize-embeddings` prints: parameters, how near the rows come, beside the projective embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prunecli.commands import console
from prunecli.commands.rewriting import Shown, change

if TYPE_CHECKING:
    from prunecli.methods.embeddings.factorize import Factors
    from prunecli.methods.embeddings.plan import EmbeddingPlan
    from prunecli.methods.embeddings.quality import Quality
    from prunecli.model.checkpoint import Checkpoint

FORMAT = "prunecli.embedding/1"


def embedding_parameters(checkpoint: Checkpoint, plan: EmbeddingPlan) -> tuple[int, int]:
    """Of everything that is the token embeddings', before and after."""
    from math import prod

    from prunecli.methods.embeddings.rewrite import embedding_shapes

    before, after = (
        sum(map(prod, embedding_shapes(checkpoint, change).values()))
        for change in (checkpoint.structure.embedding, plan.change)
    )
    return before, after


def growth(checkpoint: Checkpoint, plan: EmbeddingPlan) -> str | None:
    """A warning where the embeddings take more room afterwards; None where they do not, or only --cache is asked."""
    before, after = embedding_parameters(checkpoint, plan)
    both = plan.shape is not None and plan.output_dim is not None
    if after <= before or (plan.shape is None and plan.output_dim is None):
        return None
    if plan.is_tied and not both:
        asked, other = ("input", "output") if plan.output_dim is None else ("output", "input")
        why = f"input and output share a table, and --side {asked} stores the {other}'s apart"
        remedy = "--side both keeps one table for both."
    elif plan.change.input is not None and plan.change.input.cached:
        why = "--cache writes the rows down beside all that is left"
        remedy = "Leave out --cache for a small file; it can be given later, for the result."
    else:
        why = "the unit is larger than what it saves"
        remedy = "Choose a smaller --expand-dim or --map-dim, or --kind projective."
    grown = f"{before:,} -> {after:,} parameters ({after / before:.1%})"
    return f"Warning: the embeddings grow, {grown}: {why}.\n{remedy}"


def payload(shown: Shown, plan: EmbeddingPlan, factors: Factors | None) -> dict[str, Any]:
    """The result as JSON."""
    before, after = embedding_parameters(shown.result.source, plan)
    made: dict[str, Any] = {
        **shown.header(FORMAT, plan.seed),
        "embedding": plan.change.to_json(),
        "embedding_parameters_before": before,
        "embedding_parameters_after": after,
        **shown.sizes(),
    }
    if factors is not None and factors.fit is not None:
        fit = factors.fit
        made["input"] = {
            **_quality(fit.quality),
            "unit_parameters": fit.unit.shape.parameters,
            "table_parameters": fit.parameters_before,
            "projective": _quality(fit.baseline),
            "errors": list(fit.errors),
        }
    if factors is not None and factors.output is not None:
        made["output_layer"] = {"explained_variance": factors.output.explained_variance}
        if factors.output.quality is not None:
            made["output_layer"]["mean_cosine"] = factors.output.quality.mean_cosine
    return made


def show(shown: Shown, plan: EmbeddingPlan, factors: Factors | None) -> None:
    """The same as tables."""
    own = ["embedding parameters", *change(*embedding_parameters(shown.result.source, plan))]
    rows = [own, *shown.rows()]
    console.show(console.table("Embeddings", ("", "Before", "After", "Left"), rows))
    if factors is not None and (lines := _lines(factors)):
        columns = ("", "Explained variance", "Mean cosine", "Parameters")
        console.show(console.table("How near the rows come", columns, lines))
    shown.show_place(dry="nothing is fitted or written")


def _lines(factors: Factors) -> list[list[str]]:
    found = []
    if (fit := factors.fit) is not None:
        shape = fit.unit.shape
        found.append([f"input, {shape.kind}", *_figures(fit.quality), f"{fit.parameters_after:,}"])
        if shape.kind != "projective":
            plain = f"input, projective with the same n = {shape.map_dim}"
            found.append([plain, *_figures(fit.baseline), f"{fit.baseline_parameters:,}"])
    if (output := factors.output) is not None:
        cosine = "-" if output.quality is None else f"{output.quality.mean_cosine:.4f}"
        of = "the input's map table" if output.table is None else "its own map table"
        found.append([f"output, through {of}", f"{output.explained_variance:.2%}", cosine, ""])
    return found


def _figures(quality: Quality) -> tuple[str, str]:
    return f"{quality.explained_variance:.2%}", f"{quality.mean_cosine:.4f}"


def _quality(quality: Quality) -> dict[str, float]:
    return {"explained_variance": quality.explained_variance, "mean_cosine": quality.mean_cosine}
