"""`prunecli evaluate`: the quality of checkpoints, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import (
    ALL,
    CHECKPOINTS,
    DEMO,
    TASK,
    DemoName,
    checkpoints_or_demo,
    demo_text,
    reads_whole,
    running_by_layer,
    texts_or_demo,
)
from prunecli.commands.command import command
from prunecli.commands.outputs import OutputOptions, plot_option, result_option, write_table
from prunecli.errors import PruneError
from prunecli.evaluation.options import EvaluationOptions
from prunecli.options import TEXT, CheckpointPath, option
from prunecli.text.choice import NAMED_TEXT, NamedText, TextChoice
from prunecli.text.files import given_names
from prunecli.text.tasks import TaskName

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation

ABOUT_A_MINUTE = 2400
"""Translations of the demo model and of models pruned from it that take about a minute on one core.

The demo model makes 130 a second; models that are pruned too far make 25, since their outputs run on.
"""
PAIRS_SHOWN = 12
"""With more pairs than this, only the means are shown unless --all-pairs."""


class Evaluate(OutputOptions, TextChoice, EvaluationOptions):
    """Options of the command."""

    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"files"})

    checkpoints: tuple[CheckpointPath, ...] = CHECKPOINTS
    text: tuple[NamedText, ...] = NAMED_TEXT
    split: str = option("test", "Split of --data.", panel=TEXT, recorded=False)
    task: TaskName | None = TASK
    all_pairs: bool = option(False, f"Show every pair, even more than {PAIRS_SHOWN}.")
    demo_model: DemoName = DEMO
    everything: bool = ALL
    output: Path = result_option("evaluation.json")
    plot: Path | None = plot_option("Also draw the scores against the fraction removed")


@command(Evaluate)
def evaluate(options: Evaluate) -> None:
    """Translate with each checkpoint and score: chrF++, chrF, BLEU, spBLEU, COMET, length, over-generation.

    Language models are measured by perplexity and by the divergence of their next tokens, masked ones by the loss of
    hidden tokens, classifiers by accuracy, embedding models by cosine, Spearman's correlation and retrieval. The first
    checkpoint is the baseline. The same command resumes an interrupted run; torchrun -m prunecli evaluate … splits the
    sentences among processes.
    """
    from prunecli.commands import evaluation_tables as tables

    running_by_layer(options.memory)  # before torch is imported

    from prunecli.evaluation.evaluate import evaluate as run
    from prunecli.evaluation.options import labels_for

    named, gate = options.checkpoints, options.gate
    is_limitless = named or options.data or options.source_file or options.max_sentences or options.everything
    files = texts_or_demo(options.text, options.demo_model, "test", named)
    options = options.model_copy(
        update={
            "files": tuple(file.path for file in files),
            "names": given_names(files),
            "whole_files": reads_whole(options, is_demo=bool(files) and not options.text),
            "demo": demo_text(named),
            "most_translations": None if is_limitless else ABOUT_A_MINUTE,
        }
    )
    if processes.rank() == 0:  # which alone writes
        options.check_outputs()
    labels = labels_for(checkpoints_or_demo(named, options.demo_model))
    result = run(
        labels,
        options,
        options,
        options.output,
        task=options.task,
        force=options.force,
        progress=console.progress(options.quiet),
        say=console.note,
        warn=console.warn,
        report=tables.report,
    )
    if result is None:  # one of several processes: the first goes on
        return
    write_table(options.table, result, force=options.force)
    if options.plot is not None:
        tables.plot_evaluation(options.plot, result, labels)
    options.show(result.to_json, lambda: _show(result, options.all_pairs))
    if missed := list(gate.missed(result)):
        raise PruneError("\n".join(missed))


def _show(evaluation: Evaluation, all_pairs: bool) -> None:
    from prunecli.commands.evaluation_tables import show_examples, show_task

    if evaluation.task == "translation":
        _show_translation(evaluation, all_pairs)
    else:
        show_task(evaluation)
    show_examples(evaluation)


def _show_translation(evaluation: Evaluation, all_pairs: bool) -> None:
    from prunecli.commands.evaluation_tables import difference_table, group_table, mean_table, pair_table
    from prunecli.evaluation.significance import too_few

    count = len(evaluation.pairs)
    few = None
    if evaluation.significance is not None and (few := too_few(evaluation.data["sentences"], "sentences")):
        evaluation = evaluation.model_copy(update={"significance": None})
    if count > 1 and (all_pairs or count <= PAIRS_SHOWN):
        console.show(pair_table(evaluation))
    console.show(mean_table(evaluation))
    if evaluation.groups:
        console.show(group_table(evaluation))
        if len(evaluation.results) > 1:
            console.show(difference_table(evaluation))
    if few:
        console.warn(few)
    if (test := evaluation.significance) is not None:
        what = "* differs" if count == 1 else "Worse, better (chrF++) and *: pairs that differ"
        console.out(
            f"{what} from {test['baseline']} with p < {test['level']} "
            f"(paired bootstrap, {test['samples']:,} resamples)."
        )
    if count > PAIRS_SHOWN and not all_pairs:
        console.out(f"Means over {count} pairs; --all-pairs shows each.")
