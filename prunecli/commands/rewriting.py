"""What every rewriting command does with its decision: write the result, or only size it, and say what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prunecli.commands import console

if TYPE_CHECKING:
    from prunecli.commands.checkpoints import DemoName
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.model.decision import Decision
    from prunecli.model.rewrite import Rewrite
    from prunecli.model.stock import StockSupport
    from prunecli.pipeline import Applied
    from prunecli.progress import Progress
    from prunecli.results.rewriting import Rewriting

    Document = TypeVar("Document", bound=Rewriting)


@dataclass(frozen=True)
class How:
    """--output (None: --dry-run was given), --force, --quiet, --json, `weights`: not --config-only, and --explain."""

    output: Path | None
    force: bool
    quiet: bool
    json: bool
    weights: bool = True
    explain: bool = False

    @property
    def progress(self) -> Progress:
        """Of the whole command."""
        return console.progress(self.quiet or self.json)

    def note(self, *lines: str) -> None:
        """Lines on stderr, but with --quiet."""
        for line in () if self.quiet else lines:
            console.note(line)

    def show(self, document: Callable[[], Rewriting], tables: Callable[[], None]) -> None:
        """The result on stdout, in one of two forms; none with --quiet alone."""
        if self.json:
            console.print_json(document().to_json())
        elif not self.quiet:
            tables()

    def open(
        self, checkpoint: Path | None, demo: DemoName = "translation", *, stream: bool = False
    ) -> Checkpoint:
        """The checkpoint (default: the demo's); an output that cannot be written is refused before one is fetched.

        Args:
            stream: --stream: read its weights where they are.
        """
        from prunecli.commands.checkpoints import checkpoint_or_demo, streamed
        from prunecli.model.checkpoint import open_model
        from prunecli.tensors.hub.names import local_path
        from prunecli.tensors.transaction import refuse_target

        if self.output is not None:
            refuse_target(self.output, force=self.force, source=local_path(checkpoint))
        if stream:
            return streamed(checkpoint)
        return open_model(checkpoint_or_demo(checkpoint, demo))

    def apply(self, source: Checkpoint, rewrite: Rewrite) -> Shown:
        """Write the result, or with --dry-run only check it; what it will lack is said before."""
        from prunecli.pipeline import apply

        self.note(*not_carried(source), *not_opened(source))
        _warn_of_large(rewrite.decision)
        result = apply(
            source,
            rewrite,
            self.output,
            force=self.force,
            weights=self.weights,
            progress=self.progress,
            say=self.note,
        )
        if (traffic := source.traffic) is not None:
            came, stored = console.bytes_text(traffic.received), console.bytes_text(source.total_bytes)
            self.note(f"Fetched {came} of {stored}, in {traffic.requests:,} requests.")
        return Shown(result, self.weights, self.explain)

    def check(self, source: Checkpoint) -> None:
        """Refuse before anything heavy a model that is not known, and an output that cannot be written."""
        from prunecli.tensors.transaction import refuse_target

        source.require_architecture()
        if self.output is not None:
            refuse_target(self.output, force=self.force, source=source.path)


@dataclass(frozen=True)
class Shown:
    """What every rewriting command says of a result, as a document and as lines."""

    result: Applied
    weights: bool = True
    explain: bool = False

    def document(self, kind: type[Document], seed: int | None, **fields: Any) -> Document:
        """What `--json` prints: the fields that every kind has, and its own."""
        from prunecli.results.decisions import record
        from prunecli.results.header import header

        result, decision = self.result, self.result.rewrite.decision
        decided: dict[str, Any] = {} if decision is None else {"decision": record(decision, full=True)}
        return kind(
            **header(kind.FORMAT, [result.source], seed),
            left_out=[*result.left_out],
            output=None if result.output is None else str(result.output),
            stock=result.stock_support.to_json(),
            arguments=dict(result.rewrite.structure.history[-1]["arguments"]),
            **asdict(result.summary),
            **fields,
            **decided,
        )

    def rows(self) -> list[list[str]]:
        """Parameters and bytes, before and after, for a table."""
        of = self.result.summary
        return [
            ["parameters", *change(of.parameters_before, of.parameters_after)],
            ["bytes", *change(of.bytes_before, of.bytes_after, console.bytes_text)],
        ]

    def show_sizes(self) -> None:
        """The same as a line."""
        lines = (f"{name} {before} -> {after} ({left})" for name, before, after, left in self.rows())
        console.out(", ".join(lines))

    def show_place(self, dry: str = "nothing is written") -> None:
        """Whether it is a stock model, where it is, and what opens it."""
        support, output = self.result.stock_support, self.result.output
        if self.explain:
            from prunecli.commands.decision_tables import show_decision

            show_decision(self.result.rewrite.decision)
        console.out(support.line)
        what = opened_by(support) if self.weights else f"no weights: finetune --from-scratch {output}"
        console.out(f"Dry run: {dry}." if output is None else f"Written: {output} ({what})")


def _warn_of_large(decision: Decision | None) -> None:
    """Warn if more than half of the experts, heads, units or layers are removed."""
    if decision is None or decision.part == "token":
        return
    count = sum(place.kept.size for place in decision.places)
    removed = 1 - sum(int(place.kept.sum()) for place in decision.places) / count
    if removed > 0.5:
        console.warn(
            f"Warning: {removed:.0%} of the {decision.part}s are removed. Measure the result with prunecli evaluate; "
            "if its scores fell too far, remove less or run prunecli finetune."
        )


def opened_by(support: StockSupport) -> str:
    """What opens a result, for the line that says where it is."""
    ways = "prunecli.load_model, or from_pretrained(…, trust_remote_code=True)"
    return "stock layout" if support.is_stock else f"opens only where prunecli is installed: {ways}"


def not_carried(source: Checkpoint) -> list[str]:
    """A line that names what is left out of the result, if anything is."""
    from prunecli.tensors.side_files import in_one_line

    left_out = source.side_files.left_out
    return [f"Left out, as no part of the model: {in_one_line(left_out)}"] if left_out else []


def not_opened(source: Checkpoint) -> list[str]:
    """A line for each class that config.json names and that neither the source nor the result can be opened as."""
    from prunecli.model.opening import lacking

    return [
        f"Warning: config.json names {name}, but there is no tensor {need.rstrip('.')}: neither {source.path} nor the "
        "result opens as one."
        for name, need in lacking(source).items()
    ]


def change(before: float, after: float, text: Callable[[float], str] = "{:,}".format) -> tuple[str, str, str]:
    """Cells of a table: before, after, what is left."""
    return text(before), text(after), f"{after / before:.1%}" if before else "-"


def removal(before: int, after: int) -> tuple[str, str, str]:
    """Cells of a table: before, kept, what is removed."""
    return str(before), str(after), f"{1 - after / before:.1%}" if before else "-"
