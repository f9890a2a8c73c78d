"""What every rewriting command does with its decision: write the result, or only size it, and say what it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import CHECKPOINT, DemoName, checkpoint_or_demo
from prunecli.commands.command import AS_JSON, DRY_RUN, FORCE, QUIET
from prunecli.evaluation.on_text import RunOptions
from prunecli.options import CheckpointPath, Name, Options, compute_option, hidden_option, option, text_option
from prunecli.text.choice import TextChoice

if TYPE_CHECKING:
    from prunecli.model.axes import Axis
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.stock import StockSupport
    from prunecli.results.rewriting import QualityChange, Rewriting, Selected
    from prunecli.selection.cut import Selection

    Document = TypeVar("Document", bound=Rewriting)


def output_option(default: str) -> Any:
    """Return the field `output` of a command that writes a checkpoint."""
    return option(
        "Directory of the result.",
        Path(default),
        flag="--output -o",
        metavar="DIR",
        role="output",
    )


class WritingOptions(Options):
    """Options of every command that writes a checkpoint."""

    checkpoint: CheckpointPath | None = CHECKPOINT
    output: Path = output_option("")
    dry_run: bool = DRY_RUN
    force: bool = FORCE
    quiet: bool = QUIET
    as_json: bool = AS_JSON


class RewritingOptions(WritingOptions):
    """Options of every command that makes a checkpoint smaller: what becomes of the decision."""

    explain: bool = option("Show why each part was kept or removed.", False, recorded=False)
    check_text: Path | None = text_option(
        "Text to measure the loss on before and after: a file, or a directory like --data. Default: the text that the "
        "command runs on, if it runs the model.",
        flag="--check",
        metavar="TEXT",
        role="input",
        excludes="dry_run config_only stream",
    )
    stream: bool = compute_option(
        "Hub models: fetch only the weights that the result needs, without a copy of the rest; can be resumed.",
        False,
        recorded=False,
        needs="checkpoint",
    )
    config_only: bool = hidden_option(
        "Write the result without weights; finetune --from-scratch trains them.",
        False,
        recorded=False,
    )

    def show(self, document: Callable[[], Rewriting], blocks: Iterable[Any]) -> None:
        """Print the result as JSON or as tables and lines; see `console.result`."""
        console.result(lambda: document().to_json(), blocks, as_json=self.as_json)

    def open(self, demo: DemoName = "translation") -> Checkpoint:
        """Open the checkpoint, or the demo's; an output that cannot be written is refused before."""
        from prunecli.tensors.hub.names import local_path
        from prunecli.tensors.transaction import refuse_target

        if not self.dry_run:
            refuse_target(self.output, force=self.force, source=local_path(self.checkpoint))
        if self.stream and self.checkpoint is not None:
            return prunecli.stream_model(self.checkpoint, **console.listeners())
        return prunecli.open_model(checkpoint_or_demo(self.checkpoint, demo))

    def prune(
        self,
        source: Checkpoint,
        selection: Selection,
        *,
        rewrite: prunecli.Rewrite | None = None,
        scored: TextChoice | None = None,
        before: Iterable[Any] = (),
    ) -> None:
        """Remove the units that `selection` does not keep, and show the result.

        Args:
            rewrite: how the units are removed; None: by `cut`.
            scored: as in `apply`.
            before: tables and lines before the table of units.
        """
        shown = self.apply(source, rewrite or prunecli.cut(source, selection), scored)
        self.show(lambda: shown.selected(selection), chain(before, shown.selected_blocks(selection)))

    def apply(
        self,
        source: Checkpoint,
        rewrite: prunecli.Rewrite,
        scored: TextChoice | None = None,
    ) -> Shown:
        """Write the result, or with --dry-run only check it; measure what it costs on a little text.

        Args:
            scored: the text that the scores come from; None: without `check_text` nothing is measured.
        """
        from prunecli.model.opening import lacking
        from prunecli.tensors.side_files import in_one_line

        if left_out := source.side_files.left_out:
            console.note(f"Left out, as no part of the model: {in_one_line(left_out)}")
        for name, need in lacking(source).items():
            console.note(
                f"Warning: config.json names {name}, but there is no tensor {need.rstrip('.')}: neither {source.path} "
                "nor the result opens as one."
            )
        decision = rewrite.decision
        if decision is not None and decision.part != "token":
            count = sum(place.count for place in decision.places)
            removed = 1 - sum(place.num_kept for place in decision.places) / count
            if removed > 0.5:
                console.warn(
                    f"Warning: {removed:.0%} of the {decision.part}s are removed. Measure the result with prunecli "
                    "evaluate; if its scores fell too far, remove less or run prunecli finetune."
                )
        quality = compare = None
        wanted = self.check_text is not None or (scored is not None and (self.as_json or not self.quiet))
        if wanted and not (self.dry_run or self.config_only):
            from prunecli.evaluation.quality_check import quality_check

            steps, progress = rewrite.structure.history, console.progress()
            running = self if isinstance(self, RunOptions) else RunOptions()
            compare = quality_check(source, self.check_text, scored, steps, running, progress, console.note)
        result = prunecli.apply(
            source,
            rewrite,
            None if self.dry_run else self.output,
            force=self.force,
            weights=not self.config_only,
            **console.listeners(),
        )
        if source.is_remote:
            traffic = source.traffic
            came, stored = console.bytes_text(sum(traffic)), console.bytes_text(source.total_bytes)
            console.note(f"Fetched {came} of {stored}, in {len(traffic):,} requests.")
        if compare is not None and (quality := compare(self.output)) is not None and quality.ruined:
            console.warn(
                "Warning: the result is ruined. Remove less, choose by another score, or train it: prunecli finetune "
                f"{self.output} --teacher {source.path}"
            )
        return Shown(result, self, quality)


class WordsOptions(TextChoice):
    """Options of commands that count the tokens of text."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = (
        "pairs",
        "source_file",
        "target_file",
        "labelled",
        "whole_files",
        "context",
        "max_sentences",
    )

    split: str | None = text_option(
        "Splits of --data. Default: train, val and dev, as far as they exist.",
        metavar="A,B",
        recorded=False,
    )
    langs: tuple[Name, ...] | None = text_option(
        "Languages of --data whose text is read. Default: all.",
        metavar="A,B",
        recorded=False,
    )


class ScoredOptions(RewritingOptions, TextChoice, RunOptions):
    """Options of rewriting commands that measure units on text, or read what was measured before."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("source_file", "target_file", "labelled")

    save_scores: Path | None = text_option(
        "Also write the scores, for --scores; with --dry-run too.",
        role="output",
    )

    def text_run(self, *, measures: bool) -> prunecli.TextRun:
        """Return the text that units are measured on.

        Args:
            measures: whether the command measures anything.

        Raises:
            UsageError: scores are to be saved, and nothing is measured.
            OutputError: the file of scores cannot be written.
        """
        from prunecli.tensors.transaction import refuse_unwritable

        save, path = None, self.save_scores
        if not measures:
            self.refuse(["save_scores"], "is of no use: nothing is measured on text here.")
        if path is not None:
            refuse_unwritable(path, force=self.force)
            save = lambda scores: scores.write(path, force=self.force)  # noqa: E731
        return prunecli.TextRun(self, self, save, console.progress(), console.note)


@dataclass(frozen=True)
class Shown:
    """Document and lines about a result that every rewriting command prints."""

    result: prunecli.Applied
    options: RewritingOptions
    quality: QualityChange | None

    def document(self, kind: type[Document], **fields: Any) -> Document:
        """Document for `--json`: the fields that every kind has, and its own."""
        result, decision = self.result, self.result.rewrite.decision
        more: dict[str, Any] = {} if decision is None else {"decision": decision}
        more |= {} if self.quality is None else {"quality": self.quality}
        return kind(
            **kind.header([result.source], getattr(self.options, "seed", None)),
            left_out=[*result.left_out],
            output=None if result.output is None else str(result.output),
            stock=result.stock_support.to_json(),
            arguments=dict(result.rewrite.structure.history[-1]["arguments"]),
            **asdict(result.summary),
            **fields,
            **more,
        )

    def selected(self, selection: Selection) -> Selected:
        """Return the JSON of a selection for `--json`."""
        from prunecli.results.rewriting import Selected

        held = {name: axis.count for name, axis in selected_axes(self.result.source, selection).items()}
        return self.document(
            Selected,
            details=dict(selection.details),
            held=held,
            kept={name: sorted(selection.kept[name]) for name in held},
        )

    def selected_blocks(self, selection: Selection) -> console.Blocks:
        """Yield how many units of each axis stay, of axes of one form together, and of all; the sizes and the place."""
        from prunecli.model.parts import ranges
        from prunecli.selection.select import HOLDERS

        axes = selected_axes(self.result.source, selection)
        kind = next(iter(axes.values())).kind
        held, kept = Counter[str](), Counter[str]()
        places, forms = dict[str, None](), dict[str, None]()
        for name, axis in axes.items():
            place = axis.module or name
            if axis.kind == "unit" and axis.keys:  # a line for each layer, not for each of its experts
                place = re.sub(r"\.(expert_)?\d+$", "", place)
            form = "all " + re.sub(r"\.\d+", ".*", place)
            places[place] = forms[form] = None
            for row in (place, form, f"all {kind}s"):
                held[row] += axis.count
                kept[row] += len(selection.kept[name])
        shown = [
            *places,
            *(forms if len(forms) < len(places) else ()),
            *((f"all {kind}s",) if len(forms) > 1 else ()),
        ]
        rows = [
            {
                HOLDERS[kind]: row,
                "before": f"{held[row]:,}",
                "kept": f"{kept[row]:,}",
                "removed": f"{1 - kept[row] / held[row]:.1%}" if held[row] else None,
            }
            for row in shown
        ]
        yield console.table("Hidden units" if kind == "unit" else f"{kind}s".capitalize(), rows)
        for name, axis in axes.items() if kind == "layer" else ():
            gone = [number for number in axis.ids if number not in selection.kept[name]]
            yield f"Removed from the {axis.side}: {ranges(gone) or 'nothing'}"
        yield from self.end_blocks()

    def rows(self) -> list[dict[str, str]]:
        """Parameters and bytes, before and after, for a table."""
        of = self.result.summary
        return [
            {"": "parameters", **change(of.parameters_before, of.parameters_after)},
            {"": "bytes", **change(of.bytes_before, of.bytes_after, console.bytes_text)},
        ]

    def end_blocks(self) -> console.Blocks:
        """Yield the rows of `rows` as a line, then `place_blocks`."""
        yield ", ".join("{} {} -> {} ({})".format(*row.values()) for row in self.rows())
        yield from self.place_blocks()

    def place_blocks(self, dry: str = "nothing is written") -> console.Blocks:
        """Yield whether it is a stock model, where it is, and what opens it."""
        support, output = self.result.stock_support, self.result.output
        if self.options.explain:
            from prunecli.analysis.explanation import decision_blocks

            yield from decision_blocks(self.result.rewrite.decision)
        if self.quality is not None:
            from prunecli.evaluation.quality_check import change_line

            yield change_line(self.quality)
        yield support.line
        config_only = self.options.config_only
        what = f"no weights: finetune --from-scratch {output}" if config_only else opened_by(support)
        yield f"Dry run: {dry}." if output is None else f"Written: {output} ({what})"


def selected_axes(source: Checkpoint, selection: Selection) -> dict[str, Axis]:
    """The axes that a selection names, by their names, in the order of the model."""
    from prunecli.selection.cut import axes_beside

    return {name: axis for name, axis in axes_beside(source, selection).items() if name in selection.kept}


def opened_by(support: StockSupport) -> str:
    """Return what opens a result, for the line that names its directory."""
    ways = "prunecli.load_model, or from_pretrained(…, trust_remote_code=True)"
    return "stock layout" if support.is_stock else f"opens only where prunecli is installed: {ways}"


def dense_for_demo(options: Any) -> Any:
    """Return options with `dense_only` if the model is the demo's, a mixture of experts."""
    if options.checkpoint is not None or options.dense_only:
        return options
    console.note("The model is a mixture of experts: only its dense FFNs are changed (--dense-only).")
    return options.updated(dense_only=True)


def change(before: float, after: float, text: Callable[[float], str] = "{:,}".format) -> dict[str, str]:
    """Cells of a table: before, after, what is left."""
    return {"before": text(before), "after": text(after), "left": f"{after / before:.1%}" if before else "-"}
