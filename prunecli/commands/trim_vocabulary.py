"""`prunecli trim-vocabulary`: keep the tokens that some text needs, write a checkpoint with those."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from prunecli.commands import console
from prunecli.commands.options import (
    CheckpointArgument,
    DataOption,
    DryRunOption,
    ForceOption,
    JsonOption,
    QuietOption,
    TextFilesOption,
)
from prunecli.errors import DataError, UsageError

if TYPE_CHECKING:
    from prunecli.checkpoint.reader import Checkpoint
    from prunecli.methods.vocabulary.decide import Options
    from prunecli.methods.vocabulary.measure import Text
    from prunecli.methods.vocabulary.trim import Trim
    from prunecli.pipeline import Rewrite, Summary
    from prunecli.progress import Progress

FORMAT = "prunecli.vocabulary/1"
SPLITS = ("train", "val", "dev")
"""Read where no --split is given, those that there are."""


class DtypeName(str, Enum):
    """Values of --dtype."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def trim_vocabulary(
    checkpoint: CheckpointArgument = None,
    data: DataOption = None,
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--split",
            metavar="A,B",
            help="Splits of the text. Default: train, val and dev, those that there are.",
            show_default=False,
        ),
    ] = None,
    langs: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--langs",
            metavar="A,B",
            help="Languages of --data whose text is read; default: all. The codes of other languages stay too.",
            show_default=False,
        ),
    ] = None,
    text: TextFilesOption = None,
    min_count: Annotated[
        int,
        typer.Option(
            "--min-count",
            min=1,
            metavar="N",
            help="Occurrences that a token needs. Above 1, rare words fall into more and smaller tokens than before.",
        ),
    ] = 1,
    keep: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Further tokens to keep, one a line, as the tokenizer writes them.",
            show_default=False,
        ),
    ] = None,
    multiple_of: Annotated[
        int,
        typer.Option(
            "--multiple-of",
            min=1,
            metavar="N",
            help="Keep more tokens, up to a multiple of N (8, 64: fast on GPUs).",
        ),
    ] = 1,
    dtype: Annotated[
        Optional[DtypeName],  # noqa: UP045
        typer.Option("--dtype", help="Type of the written weights; default: as stored.", show_default=False),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The trimmed checkpoint.")
    ] = Path("trimmed-vocabulary"),
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Remove the tokens that the given text does not need, from the embeddings and from the tokenizer.

    Special and added tokens, language codes, single characters and bytes always stay. The text falls into the same
    tokens as before, under new ids; this is checked before anything is written. Other text falls into smaller ones.
    """
    from prunecli.checkpoint.reader import open_checkpoint
    from prunecli.checkpoint.transaction import refuse_target
    from prunecli.methods.vocabulary.decide import Options

    if data is None and not text:
        data = _demo_text(checkpoint)
    if data is None and (split is not None or langs is not None):
        raise UsageError("--split and --langs go with --data.", "Name a directory of text with --data.")
    path = console.demo_checkpoint(checkpoint)
    with open_checkpoint(path) as opened:
        opened.require_architecture()  # refused before anything heavy, as is an output that cannot be written
        if not dry_run:
            refuse_target(output, force=force, source=opened.path)
        options = Options(
            min_count=min_count,
            keep=_kept(keep),
            multiple_of=multiple_of,
            dtype=None if dtype is None else dtype.value,
        )
        chosen = _text(data, _names("--split", split), _names("--langs", langs), text or ())
        _run(opened, options, chosen, None if dry_run else output, force=force, quiet=quiet, json=json)


def _run(
    checkpoint: Checkpoint,
    options: Options,
    text: Text,
    output: Path | None,
    *,
    force: bool,
    quiet: bool,
    json: bool,
) -> None:
    from prunecli.methods.vocabulary.trim import trim, trimmed_config
    from prunecli.pipeline import Rewrite, stock_config, summarize

    progress = console.progress(quiet or json)
    made = trim(checkpoint, text, options, progress)
    if not quiet:
        for name in made.left_out:
            console.note(
                f"{name} is left out: it holds the old vocabulary in a form that cannot be shortened."
            )
    structure = checkpoint.structure.after(made.decision.step)
    config = trimmed_config(checkpoint, stock_config(checkpoint, structure), made.decision)
    rewrite = Rewrite(structure, made.outputs, config)
    if output is None:
        summary = summarize(checkpoint, rewrite)
    else:
        summary = _write(checkpoint, rewrite, made, output, force=force, progress=progress)
    if json:
        console.print_json(_payload(checkpoint, made, text, summary, output))
    elif not quiet:
        _show(made, summary, rewrite, output)


def _write(
    checkpoint: Checkpoint, rewrite: Rewrite, made: Trim, output: Path, *, force: bool, progress: Progress
) -> Summary:
    """Stream the tensors, then lay the trimmed tokenizer's files over the original's; whole or not at all."""
    from prunecli.checkpoint.transaction import new_directory
    from prunecli.pipeline import rewrite_checkpoint

    needed = sum(tensor.nbytes for tensor in rewrite.outputs)
    with new_directory(output, force=force, needed_bytes=needed, source=checkpoint.path) as directory:
        inner = directory / "made"
        summary = rewrite_checkpoint(checkpoint, rewrite, inner, progress=progress)
        for name, content in made.files.items():
            if content is None:
                (inner / name).unlink()
            else:
                (inner / name).write_bytes(content)
        for path in sorted(inner.iterdir()):
            path.rename(directory / path.name)
        inner.rmdir()
    return summary


def _payload(
    checkpoint: Checkpoint, made: Trim, text: Text, summary: Summary, output: Path | None
) -> dict[str, Any]:
    from dataclasses import asdict

    from prunecli.checkpoint.documents import header

    decision = made.decision
    return {
        **header(FORMAT, [checkpoint], None),
        "output": None if output is None else str(output),
        "arguments": dict(decision.step["arguments"]),
        "tokens_before": decision.size,
        "tokens_after": len(decision.kept),
        "parts": dict(decision.parts),
        "text": {
            "sentences": text.sentences,
            "sha256": text.sha256,
            "share_kept": decision.share,
            **{f"compared_{name}": value for name, value in asdict(made.check).items()},
        },
        "embedding_parameters_before": made.embedding_parameters[0],
        "embedding_parameters_after": made.embedding_parameters[1],
        "embedding_bytes_before": made.embedding_bytes[0],
        "embedding_bytes_after": made.embedding_bytes[1],
        "parameters_before": summary.parameters_before,
        "parameters_after": summary.parameters_after,
        "bytes_before": summary.bytes_before,
        "bytes_after": summary.bytes_after,
        "left_out": list(made.left_out),
        "kept": list(decision.kept),
    }


def _show(made: Trim, summary: Summary, rewrite: Rewrite, output: Path | None) -> None:
    decision, check = made.decision, made.check
    rows = [[name, "", f"{count:,}", ""] for name, count in decision.parts.items()]
    rows += [
        ["tokens", *_change((decision.size, len(decision.kept)))],
        ["embedding parameters", *_change(made.embedding_parameters)],
        ["embedding bytes", *_change(made.embedding_bytes, console.bytes_text)],
        ["parameters", *_change((summary.parameters_before, summary.parameters_after))],
        ["bytes", *_change((summary.bytes_before, summary.bytes_after), console.bytes_text)],
    ]
    console.show(console.table("Vocabulary", ("", "Before", "After", "Left"), rows))
    if check.changed:
        console.out(
            f"{decision.share:.2%} of the running tokens stay; {check.changed:,} of {check.sentences:,} different "
            f"sentences fall into other tokens ({check.running_before:,} -> {check.running_after:,} in all)."
        )
    else:
        console.out(f"All {check.sentences:,} different sentences fall into the same tokens as before.")
    console.out(
        "Dry run: nothing is written." if output is None else f"Written: {output} ({_opens(rewrite)})"
    )


def _change(sizes: tuple[int, int], text: Any = "{:,}".format) -> tuple[str, str, str]:
    before, after = sizes
    return text(before), text(after), f"{after / before:.1%}" if before else "-"


def _opens(rewrite: Rewrite) -> str:
    from prunecli.architectures import REDUCED_PREFIX

    if str(rewrite.config.get("model_type")).startswith(REDUCED_PREFIX):
        return "opens with prunecli, or from_pretrained(…, trust_remote_code=True)"
    return "stock layout"


def _demo_text(checkpoint: Path | None) -> Path:
    """The demo's text for the demo model; for another model it would be the wrong one."""
    if checkpoint is not None:
        raise UsageError(
            "No text is given, and it says which tokens stay.", "Give --data DIR, --text FILE, or both."
        )
    from prunecli import demo

    console.note("No --data given: using the demo's text.")
    found: Path = demo.DATA
    return found


def _text(data: Path | None, splits: tuple[str, ...], langs: tuple[str, ...], files: Sequence[Path]) -> Text:
    from prunecli.methods.vocabulary.measure import read_text

    if data is not None and not splits:
        splits = tuple(name for name in SPLITS if _is_split(data, name)) or (SPLITS[0],)
    return read_text(data, splits, langs or None, files)


def _is_split(data: Path, name: str) -> bool:
    from prunecli.data.parallel import languages_of

    try:
        return bool(languages_of(data, name))
    except DataError:
        return False


def _kept(path: Path | None) -> tuple[str, ...]:
    """The tokens of --keep."""
    if path is None:
        return ()
    from prunecli.data.parallel import read_lines

    return tuple(dict.fromkeys(line for line in read_lines(path) if line))


def _names(option: str, text: str | None) -> tuple[str, ...]:
    """`a, b` -> (a, b), each once."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise UsageError(f"{option} {text!r}: an empty name.", "Separate names by single commas.")
    return names
