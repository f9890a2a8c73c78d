"""`prunecli score-heads`: how much each attention head matters."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prunecli.commands import console
from prunecli.commands.memory_options import MemoryOption, SpillDirOption, memory_bytes, report_run
from prunecli.commands.options import (
    BatchTokensOption,
    CheckpointArgument,
    ComputeDtypeOption,
    ContextOption,
    DataOption,
    DeviceOption,
    ForceOption,
    JsonOption,
    LabelledOption,
    LangsOption,
    MaxSentencesOption,
    PairsOption,
    QuietOption,
    SeedOption,
    SourceFileOption,
    TableOption,
    TargetFileOption,
    TaskOption,
    TextFilesOption,
)
from prunecli.commands.outputs import check_outputs, write_table, written
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.methods.heads.measure import AblationOptions, LoadedModel
    from prunecli.results.heads import HeadScores, Per
    from prunecli.text.choice import Dataset


class MethodName(str, enum.Enum):
    """Values of --method."""

    gradient = "gradient"
    ablation = "ablation"
    all_but_one = "all-but-one"


class ImportanceName(str, enum.Enum):
    """Values of --importance."""

    example = "example"
    token = "token"


class MetricChoice(str, enum.Enum):
    """Values of --metric."""

    chrf = "chrf++"
    bleu = "bleu"
    loss = "loss"
    accuracy = "accuracy"


def score_heads(
    checkpoint: CheckpointArgument = None,
    data: DataOption = None,
    split: Annotated[str, typer.Option("--split", help="Split of the text.")] = "val",
    source_file: SourceFileOption = None,
    target_file: TargetFileOption = None,
    langs: LangsOption = None,
    pairs: PairsOption = None,
    text: TextFilesOption = None,
    labelled: LabelledOption = None,
    task: TaskOption = None,
    method: Annotated[
        MethodName,
        typer.Option(
            "--method",
            help="gradient: one forward and backward pass; ablation: the score without each head; all-but-one: "
            "with each head alone in its layer.",
        ),
    ] = MethodName.gradient,
    importance: Annotated[
        ImportanceName | None,
        typer.Option(
            "--importance",
            help="What gradient takes the absolute value of: the sum over each example's tokens, as eq. 2 says, or "
            "each token, as the authors' code does; default: example.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        MetricChoice | None,
        typer.Option(
            "--metric",
            help="The score of ablation and all-but-one; default: chrf++, accuracy or loss, by task. loss is fast.",
            show_default=False,
        ),
    ] = None,
    beam: Annotated[int, typer.Option("--beam", min=1, help="Beams per sentence for chrf++ and bleu.")] = 4,
    select_data: Annotated[
        Path | None,
        typer.Option(
            "--select-data",
            help="all-but-one: choose the best heads on this text (a directory as --data, or a file as --text or "
            "--labelled), report them on the other.",
            show_default=False,
        ),
    ] = None,
    select_split: Annotated[
        str | None,
        typer.Option("--select-split", help="The same, by split of the text.", show_default=False),
    ] = None,
    context: ContextOption = None,
    batch_tokens: BatchTokensOption = 4096,
    max_sentences: MaxSentencesOption = None,
    bootstrap: Annotated[
        int, typer.Option("--bootstrap", min=1, help="Resamples of the significance test of chrf++ and bleu.")
    ] = 1000,
    seed: SeedOption = 12345,
    memory: MemoryOption = None,
    spill_dir: SpillDirOption = None,
    device: DeviceOption = "auto",
    dtype: ComputeDtypeOption = "auto",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Draw the heat map, layers by heads."),
    ] = None,
    table: TableOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The scores.")] = Path("heads.json"),
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Score attention heads: what the model loses without each.

    The gradient method's file holds sums over examples, so files of several texts merge in prune-heads.
    """
    from dataclasses import replace

    from prunecli import demo
    from prunecli.commands.checkpoints import checkpoint_or_demo
    from prunecli.commands.head_tables import draw, show
    from prunecli.model.checkpoint import open_model
    from prunecli.results.header import header
    from prunecli.tensors.documents import write_json
    from prunecli.text.choice import TextChoice
    from prunecli.text.tasks import task_of

    check_outputs(output, plot, table, force=force)
    budget = memory_bytes(memory, spill_dir)
    _check_options(method, importance, metric, select_data, select_split, budget, dtype)
    with open_model(checkpoint_or_demo(checkpoint)) as opened:
        layers = opened.layout.attentions  # a family that is not declared is refused before anything heavy
        choice = TextChoice(
            data=data,
            split=split,
            source_file=source_file,
            target_file=target_file,
            langs=langs,
            pairs=pairs,
            files=tuple(text or ()),
            labelled=labelled,
            max_sentences=max_sentences,
            context=context,
            demo=demo.DATA,
        )
        chosen_task = task or task_of(opened)
        choice.check(chosen_task)
        reported = choice.read(chosen_task, console.note)
        other = choice.selecting(chosen_task, select_data, select_split)
        selected = None if other is None else other.read(chosen_task, console.note)

        from prunecli.evaluation.decoding import DecodingOptions
        from prunecli.evaluation.options import labels_for
        from prunecli.methods.heads.measure import (
            AblationOptions,
            LoadedModel,
            check_metric,
            score_by_gradient,
        )
        from prunecli.modules.loading import choose_device, load_model
        from prunecli.modules.precision import candidates, decoding, dtype_name, fitting_dtype, nothing
        from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
        from prunecli.running.runner import InMemory, Runner
        from prunecli.text.tokens import load_tokenizer

        options = AblationOptions(
            check_metric(chosen_task, None if metric is None else metric.value),
            DecodingOptions(beam, batch_tokens),
            bootstrap,
            seed,
        )
        per: Per = "example" if importance is None else importance.value
        where, gradients = choose_device(device), method is MethodName.gradient
        tokenizer = load_tokenizer(opened.path)
        progress = console.progress(quiet)
        if budget is not None:
            kind = candidates(dtype, [opened], where, gradients=gradients)[0]
        else:
            kind = fitting_dtype(
                dict.fromkeys(labels_for([opened.path]), opened),
                where,
                dtype,
                beside=nothing if gradients else decoding(options.decoding.load),
                gradients=gradients,
                by_layer="--memory" if gradients else "",
                say=console.note,
            )
        if gradients:
            runner: Runner
            if budget is not None:
                run_report = RunReport()
                runner = Layerwise(opened, Resources(where, kind, budget, spill_dir), run_report)
            else:
                runner = InMemory(load_model(opened.path, device=where, dtype=kind))
            scores = score_by_gradient(runner, opened, tokenizer, reported, batch_tokens, progress, per=per)
            if budget is not None:
                report_run(run_report, back=True)
        else:
            loaded = LoadedModel(opened, load_model(opened.path, device=where, dtype=kind), tokenizer)
            scores = _ablate(loaded, reported, selected, method, options, progress)
        scores = replace(scores, dtype=dtype_name(kind))
        payload = {**header(scores.FORMAT, [opened], None if gradients else seed), **scores.to_json()}
    write_json(output, payload, force=force)
    write_table(table, scores, force=force)
    if plot is not None:
        draw(scores, layers, plot)
    if json:
        console.print_json(payload)
    elif not quiet:
        show(scores, layers)
        console.note(written(output, plot, table))


def _check_options(
    method: MethodName,
    importance: ImportanceName | None,
    metric: MetricChoice | None,
    select_data: Path | None,
    select_split: str | None,
    memory: int | None,
    dtype: str,
) -> None:
    if method is MethodName.gradient and dtype == "float16":
        raise UsageError(
            "--dtype float16: small gradients vanish in it",
            "Choose bfloat16 or float32 for --method gradient.",
        )
    if method is not MethodName.gradient and memory is not None:
        raise UsageError(
            f"--memory goes with --method gradient: {method.value} runs parts of the model again and again",
            "Leave out --memory on a machine that holds the model, or choose --method gradient.",
        )
    if method is not MethodName.gradient and importance is not None:
        raise UsageError(
            f"--importance goes with --method gradient: {method.value} takes no gradients",
            "Leave out --importance, or choose --method gradient.",
        )
    if method is MethodName.gradient and metric is not None:
        raise UsageError(
            "--metric goes with --method ablation or all-but-one: the gradient is that of the loss",
            "Leave out --metric, or choose another --method.",
        )
    if method is not MethodName.all_but_one and (select_data is not None or select_split is not None):
        raise UsageError(
            "--select-data and --select-split go with --method all-but-one", "Leave them out, or choose it."
        )


def _ablate(
    loaded: LoadedModel,
    reported: Dataset,
    selected: Dataset | None,
    method: MethodName,
    options: AblationOptions,
    progress: Any,
) -> HeadScores:
    """The scores of ablation or all-but-one."""
    from dataclasses import replace

    from prunecli.methods.heads.measure import report_best, score_by_ablation

    by_metric = score_by_ablation(loaded, selected or reported, method.value, options, progress)
    scores, *others = by_metric.values()
    best = None if selected is None else report_best(loaded, reported, scores.best(), options, progress)
    return replace(scores, also=tuple(others), reported=best)
