"""`prunecli bench-latency`: speed and memory of checkpoints, side by side."""

from pathlib import Path

import prunecli
from prunecli.commands import console
from prunecli.commands.checkpoints import ModelsOptions, checkpoints_or_demo
from prunecli.commands.command import command, plot_option, result_option
from prunecli.evaluation.options import LatencyOptions, labels_for
from prunecli.tensors.quantities import counted
from prunecli.text.files import TextFile

MANY = 4
"""With more checkpoints than this in the folder, and none named, less is measured of each."""


class BenchLatency(ModelsOptions, LatencyOptions):
    """Options of the command."""

    LEFT_OUT = frozenset({"source_file", "target_file", "langs", "max_sentences"})

    output: Path = result_option("latency.json")
    plot: Path | None = plot_option("Draw the speed against batch size")


@command(BenchLatency)
def bench_latency(options: BenchLatency) -> None:
    """Measure the speed of checkpoints on the same text, in turns, and compare them with the first.

    Translation models decode the same sentences to the same length. Classifiers (--labelled), embedding models and
    masked language models (--text) are timed by examples per second, language models (--text) by the tokens per
    second that they read of a prompt and generate after it.
    """
    from prunecli.results.latency import NOISY

    options.check_outputs()
    labels = labels_for(checkpoints_or_demo(options.checkpoints, options.demo_model))
    is_chosen = options.checkpoints or options.everything or "sentences" in options.model_fields_set
    if len(labels) > MANY and not is_chosen:
        options = options.updated(sentences=max(1, options.sentences * MANY * 2 // len(labels)), memory=False)
        console.note(
            f"{counted(len(labels), 'checkpoint')}: {counted(options.sentences, 'sentence')} a run, without load times "
            "and peak memory, takes about a minute; --all measures everything."
        )
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
