"""`prunecli evaluate` and `bench-latency`: quality, speed and memory of checkpoints, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import prunecli
from prunecli import processes
from prunecli.commands import console
from prunecli.commands.checkpoints import ModelsOptions, ask_huge_pages, checkpoints_or_demo
from prunecli.commands.command import command, plot_option, result_option
from prunecli.errors import PruneError
from prunecli.evaluation.options import EvaluationOptions, LatencyOptions, labels_for
from prunecli.options import option
from prunecli.text.choice import NAMED_TEXT, NamedText
from prunecli.text.files import TextFile

if TYPE_CHECKING:
    from prunecli.results.evaluation import Evaluation


PAIRS_SHOWN = 12
"""With more pairs than this, only the means are shown unless --all-pairs."""
LONGEST_EXAMPLE = 200
"""Letters of an example; the rest is left out."""


class Evaluate(ModelsOptions, EvaluationOptions):
    """Options of the command."""

    LEFT_OUT = ("files",)

    text: tuple[NamedText, ...] = NAMED_TEXT
    all_pairs: bool = option(f"Show every pair, even more than {PAIRS_SHOWN}.", False)
    output: Path = result_option("evaluation.json")
    plot: Path | None = plot_option("Also draw the scores against the fraction removed")


@command
def evaluate(options: Evaluate) -> None:
    """Measure the quality of checkpoints on the same text, and compare them with the first.

    Translations are scored by chrF++, chrF, BLEU, spBLEU, COMET, their length and repetitions. Language models are
    measured by perplexity and by the divergence of their next tokens, masked ones by the loss of hidden tokens,
    classifiers by accuracy, embedding models by cosine, Spearman's correlation and retrieval. The same command
    resumes an interrupted run; torchrun -m prunecli evaluate … splits the sentences among processes.
    """
    if options.memory is not None:
        ask_huge_pages()  # before torch is imported

    from prunecli.results.evaluation import LEAST

    options = options.with_text(options.text)
    if processes.rank() == 0:  # which alone writes
        options.check_outputs()
    labels = labels_for(checkpoints_or_demo(options.checkpoints, options.demo_model))
    is_demo = options.demo_model == "translation" and not options.checkpoints
    if is_demo and options.max_sentences is None and {*options.given} <= {"langs", "pairs"}:
        console.note(f"{LEAST} sentences of each pair of languages; --max-sentences takes more.")
        options = options.updated(max_sentences=LEAST)
    result = prunecli.evaluate(
        labels,
        options,
        options,
        options.output,
        task=options.task,
        force=options.force,
        **console.listeners(),
    )
    if result is None:  # one of several processes: the first goes on
        return
    options.finish(
        result,
        _blocks(result, options.all_pairs),
        lambda draw: [draw.evaluation_pictures(result, labels)],
        is_written=True,
    )
    if missed := list(options.missed(result)):
        raise PruneError("\n".join(missed))


def _blocks(evaluation: Evaluation, all_pairs: bool) -> console.Blocks:
    """Yield the tables, what is wrong with the outputs, and examples if there is little to read."""
    from prunecli.results.evaluation import WIDE

    evaluation, few = evaluation.tested
    yield from evaluation.shown(None if all_pairs else PAIRS_SHOWN)
    if few:
        console.warn(few)
    if (test := evaluation.significance) is not None:
        samples = f", {test['samples']:,} resamples" if "samples" in test else ""
        yield f"* differs from {test['baseline']} with p < {test['level']} ({test['test']}{samples})."
    if len(evaluation.pairs) > PAIRS_SHOWN and not all_pairs:
        yield f"Means over {len(evaluation.pairs)} pairs; --all-pairs shows each."
    yield from evaluation.ruined
    if not evaluation.examples or len(evaluation.results) > WIDE:
        return
    rows: list[dict[str, str | None]] = []
    for example in evaluation.examples:
        name = ", ".join(filter(None, ["input", example.pair or example.text]))
        reference = {} if example.reference is None else {"reference": example.reference}
        for label, text in {name: example.source, **reference, **example.outputs}.items():
            line = " ".join(text.split())
            shown = line if len(line) <= LONGEST_EXAMPLE else f"{line[:LONGEST_EXAMPLE]}…"
            rows.append({"": label, "text": shown})
        rows.append({"": "", "text": ""})
    title = "Where the outputs differ most" if len(evaluation.results) > 1 else "The worst outputs"
    yield console.table(title, rows[:-1], text_columns=2)


class BenchLatency(ModelsOptions, LatencyOptions):
    """Options of the command."""

    LEFT_OUT = ("source_file", "target_file", "langs", "max_sentences")

    output: Path = result_option("latency.json")
    plot: Path | None = plot_option("Draw the speed against batch size")


@command
def bench_latency(options: BenchLatency) -> None:
    """Measure the speed of checkpoints on the same text, in turns, and compare them with the first.

    Translation models decode the same sentences to the same length. Classifiers (--labelled), embedding models and
    masked language models (--text) are timed by examples per second, language models (--text) by the tokens per
    second that they read of a prompt and generate after it.
    """
    from prunecli.results.latency import NOISY

    options.check_outputs()
    labels = labels_for(checkpoints_or_demo(options.checkpoints, options.demo_model))
    options = options.with_text([TextFile(path) for path in options.files])
    latency = prunecli.bench_latency(
        labels, options, options, console.progress(), console.note, task=options.task
    )
    blocks = [*latency.shown, latency.about]
    noisy = [one.checkpoint for one in latency.results if any(row.is_noisy for row in one.timings)]
    if noisy:
        blocks += [
            f"Noisy, more than {NOISY:.0%} from run to run: {', '.join(noisy)}.",
            f"Repeat on a quiet machine, or with more runs: --runs {2 * latency.runs + 1}.",
        ]
    if not latency.interleaved:
        blocks.append("Not enough memory for all at once: the checkpoints were timed one after the other.")
    options.finish(latency, blocks)
