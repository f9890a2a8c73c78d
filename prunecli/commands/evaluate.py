"""`prunecli evaluate`: translation quality of checkpoints, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from prunecli.commands import console
from prunecli.commands.options import (
    BatchTokensOption,
    CheckpointsArgument,
    ComputeDtypeOption,
    DataOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    LangsOption,
    MaxSentencesOption,
    PairsOption,
    QuietOption,
    SeedOption,
    SourceFileOption,
    TargetFileOption,
)
from prunecli.errors import UsageError

PAIRS_SHOWN = 12
"""With more pairs than this, only the means are shown unless --all-pairs."""


def evaluate(
    checkpoints: CheckpointsArgument = None,
    data: DataOption = None,
    split: Annotated[str, typer.Option("--split", help="Split of the text.")] = "test",
    source_file: SourceFileOption = None,
    target_file: TargetFileOption = None,
    langs: LangsOption = None,
    pairs: PairsOption = None,
    task: Annotated[str, typer.Option("--task", help="What is measured: translation.")] = "translation",
    beam: Annotated[int, typer.Option("--beam", min=1, help="Beam size; 1 is greedy search.")] = 4,
    batch_tokens: BatchTokensOption = 2048,
    max_new_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--max-new-tokens",
            min=1,
            metavar="N",
            help="Longest output; default: 3 x source tokens + 50, within the model's positions.",
            show_default=False,
        ),
    ] = None,
    max_sentences: MaxSentencesOption = None,
    spm: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--spm",
            help="FLORES-200's SentencePiece model, for spBLEU; default: where sacrebleu keeps it.",
            show_default=False,
        ),
    ] = None,
    bootstrap: Annotated[
        int, typer.Option("--bootstrap", min=0, help="Resamples of the significance test; 0: no test.")
    ] = 1000,
    seed: SeedOption = 12345,
    hypotheses: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--hypotheses", help="Keep the outputs: DIR/CHECKPOINT/SPLIT.PAIR.hyp.", metavar="DIR"),
    ] = None,
    all_pairs: Annotated[
        bool,
        typer.Option("--all-pairs", help=f"Show every pair, also where there are more than {PAIRS_SHOWN}."),
    ] = False,
    device: DeviceOption = "auto",
    dtype: ComputeDtypeOption = "auto",
    output: Annotated[Path, typer.Option("--output", "-o", help="The result.")] = Path("evaluation.json"),
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Translate with each checkpoint and score: chrF++, BLEU, spBLEU, length, over-generation.

    The first checkpoint is the baseline: the others are tested against it by paired bootstrap.

    An interrupted run goes on where it stopped when it is started again with the same arguments.
    """
    if task != "translation":
        raise UsageError(f"--task {task}: there is no such task", "Known: translation.")
    from prunecli.commands import found
    from prunecli.evaluation.decoding import DecodingOptions
    from prunecli.evaluation.evaluate import EvaluationOptions, labels_for
    from prunecli.evaluation.evaluate import evaluate as run
    from prunecli.evaluation.partial import PartialTranslations, partial_path
    from prunecli.evaluation.scoring import spm_file, spm_missing

    labels = labels_for(found.checkpoints_or_found(checkpoints))
    text, chosen = found.chosen_text(data, split, source_file, target_file, pairs, langs)
    if pairs is None:
        chosen = _fitting(list(labels.values()), chosen)
    spm = spm_file(spm)
    if spm is None:
        console.note(spm_missing())
    earlier = PartialTranslations(partial_path(output))
    if len(earlier):
        console.note(f"Going on from {earlier.path}, which an interrupted run left behind.")
    options = EvaluationOptions(
        decoding=DecodingOptions(beam, batch_tokens, max_new_tokens),
        device=device,
        dtype=dtype,
        samples=bootstrap,
        seed=seed,
        spm=spm,
        hypotheses=hypotheses,
    )
    try:
        payload = run(
            labels,
            text.first(max_sentences),
            chosen,
            options,
            output,
            force=force,
            progress=console.progress(quiet),
        )
    except KeyboardInterrupt:
        if partial_path(output).is_file():
            console.note("Finished pairs are kept: the same command goes on from them.")
        raise
    if json:
        console.print_json(payload)
    elif not quiet:
        _show(payload, all_pairs)
        console.note(f"Written to {output}.")


def _fitting(checkpoints: Sequence[Path], pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Without --pairs: only what the pruned checkpoints were pruned for, where that is anything."""
    from prunecli.commands.found import pruned_pairs

    kept = tuple(pruned_pairs(checkpoints, pairs))
    if not kept or kept == pairs:
        return pairs
    console.note(
        f"{len(kept)} of {len(pairs)} pairs: what the checkpoints were pruned for (--pairs chooses others)."
    )
    return kept


def _show(payload: Mapping[str, Any], all_pairs: bool) -> None:
    from prunecli.commands.evaluation_table import mean_table, pair_table

    count = len(payload["pairs"])
    if count > 1 and (all_pairs or count <= PAIRS_SHOWN):
        console.show(pair_table(payload))
    console.show(mean_table(payload))
    if payload["significance"] is not None:
        test = payload["significance"]
        what = "* differs" if count == 1 else "Worse, better (chrF++) and *: pairs that differ"
        console.out(
            f"{what} from {test['baseline']} with p < {test['level']} "
            f"(paired bootstrap, {test['samples']:,} resamples)."
        )
    if count > PAIRS_SHOWN and not all_pairs:
        console.out(f"Means over {count} pairs; --all-pairs shows each.")
