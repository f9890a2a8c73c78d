"""`prunecli score-heads`: how much each attention head matters."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from prunecli.commands import console
from prunecli.commands.memory_options import MemoryOption, SpillDirOption, memory_bytes
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
    TargetFileOption,
    TextFilesOption,
)
from prunecli.commands.outputs import check_outputs
from prunecli.commands.task_choice import TaskOption, check_options, task_of
from prunecli.errors import UsageError

if TYPE_CHECKING:
    from prunecli.methods.heads.measure import AblationOptions, Material, Subject
    from prunecli.methods.heads.statistics import HeadScores


class MethodName(str, enum.Enum):
    """Values of --method."""

    gradient = "gradient"
    ablation = "ablation"
    all_but_one = "all-but-one"


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
    metric: Annotated[
        Optional[MetricChoice],  # noqa: UP045
        typer.Option(
            "--metric",
            help="The score of ablation and all-but-one; default: chrf++, accuracy or loss, by task. loss is fast.",
            show_default=False,
        ),
    ] = None,
    beam: Annotated[int, typer.Option("--beam", min=1, help="Beams per sentence for chrf++ and bleu.")] = 4,
    select_data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--select-data",
            help="all-but-one: choose the best heads on this text (a directory as --data, or a file as --text or "
            "--labelled), report them on the other.",
            show_default=False,
        ),
    ] = None,
    select_split: Annotated[
        Optional[str],  # noqa: UP045
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
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", metavar="FILE.png", help="Draw the heat map, layers by heads."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The scores.")] = Path("heads.json"),
    force: ForceOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Score attention heads: what the model loses without each.

    The gradient method's file holds sums over examples, so files of several texts merge in prune-heads.
    """
    from prunecli.checkpoint.attention import attention_layers
    from prunecli.checkpoint.documents import header, write_json
    from prunecli.checkpoint.reader import open_checkpoint
    from prunecli.commands.found import checkpoint_or_demo
    from prunecli.commands.head_layers import score_by_layer
    from prunecli.commands.head_material import Choice, material, selection

    check_outputs(output, plot, force=force)
    budget = memory_bytes(memory, spill_dir)
    _check_options(method, metric, select_data, select_split, budget, dtype)
    with open_checkpoint(checkpoint_or_demo(checkpoint)) as opened:
        layers = attention_layers(opened)  # a family that is not declared is refused before anything heavy
        choice = Choice(
            data,
            split,
            source_file,
            target_file,
            langs,
            pairs,
            tuple(text or ()),
            labelled,
            max_sentences,
            context,
        )
        chosen_task = task_of(opened) if task is None else task.value
        check_options(chosen_task, choice.given)
        reported = material(chosen_task, choice)
        selected = selection(chosen_task, choice, select_data, select_split)

        from prunecli.data.tokens import load_tokenizer
        from prunecli.evaluation.decoding import DecodingOptions
        from prunecli.evaluation.evaluate import labels_for
        from prunecli.methods.heads.measure import AblationOptions, Subject, check_metric
        from prunecli.methods.heads.statistics import FORMAT, scores_payload
        from prunecli.modules.fitting import decoding, fitting_dtype, nothing
        from prunecli.modules.layerwise.session import Means
        from prunecli.modules.loading import choose_device, load_model
        from prunecli.modules.precision import candidates, dtype_name

        options = AblationOptions(
            check_metric(chosen_task, None if metric is None else metric.value),
            DecodingOptions(beam, batch_tokens),
            bootstrap,
            seed,
        )
        where, gradients = choose_device(device), method is MethodName.gradient
        tokenizer = load_tokenizer(opened.path)
        progress, more = console.progress(quiet), dict[str, Any]()
        if budget is not None:
            kind = candidates(dtype, [opened], where, gradients=gradients)[0]
            means = Means(where, kind, budget, spill_dir)
            scores = score_by_layer(opened, tokenizer, reported, batch_tokens, means, progress)
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
            subject = Subject(opened, load_model(opened.path, device=where, dtype=kind), tokenizer)
            scores, more = _score(subject, reported, selected, method, options, progress)
        sampled = method is not MethodName.gradient
        payload = {
            **header(FORMAT, [opened], seed if sampled else None),
            **scores_payload(scores),
            "dtype": dtype_name(kind),
            **more,
        }
    write_json(output, payload, force=force)
    if plot is not None:
        _draw(scores, layers, plot)
    if json:
        console.print_json(payload)
    elif not quiet:
        _show(scores, layers, more)
        console.note(f"Written to {output}{'' if plot is None else f' and {plot}'}.")


def _check_options(
    method: MethodName,
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
    if method is MethodName.gradient and metric is not None:
        raise UsageError(
            "--metric goes with --method ablation or all-but-one: the gradient is that of the loss",
            "Leave out --metric, or choose another --method.",
        )
    if method is not MethodName.all_but_one and (select_data is not None or select_split is not None):
        raise UsageError(
            "--select-data and --select-split go with --method all-but-one", "Leave them out, or choose it."
        )


def _score(
    subject: Subject,
    reported: Material,
    selected: Material | None,
    method: MethodName,
    options: AblationOptions,
    progress: Any,
) -> tuple[HeadScores, dict[str, Any]]:
    """The scores, and what the file holds beside them."""
    from prunecli.methods.heads.measure import report_best, score_by_ablation, score_by_gradient
    from prunecli.methods.heads.statistics import VALUES

    if method is MethodName.gradient:
        return score_by_gradient(subject, reported, options.decoding.batch_tokens, progress), {}
    found = score_by_ablation(subject, selected or reported, method.value, options, progress)
    scores, *others = found.values()
    more: dict[str, Any] = {
        "also": {
            other.metric: {
                "base": other.base,
                VALUES[other.method]: {name: array.tolist() for name, array in other.values.items()},
                "p_value": {name: array.tolist() for name, array in other.p_values.items()},
            }
            for other in others
        }
    }
    if not others:
        more = {}
    if selected is not None:
        more["reported"] = report_best(subject, reported, scores.best(), options, progress)
    return scores, more


def _values(scores: HeadScores) -> dict[str, Any]:
    """What is shown of every head: I_h, or the score's difference from that of the whole model."""
    if scores.method == "gradient":
        return {name: array / scores.examples for name, array in scores.values.items()}
    return {name: array - (scores.base or 0.0) for name, array in scores.values.items()}


_TITLES = {
    "gradient": "Importance (I_h of eq. 2, not normalised)",
    "ablation": "Change of {metric} without the head",
    "all-but-one": "Change of {metric} with the head alone in its layer",
}


def _title(scores: HeadScores) -> str:
    return _TITLES[scores.method].format(metric=_metric(scores))


def _metric(scores: HeadScores) -> str:
    from prunecli.commands.evaluation_table import TITLES

    return TITLES.get(str(scores.metric), str(scores.metric))


def _draw(scores: HeadScores, layers: Any, path: Path) -> None:
    from prunecli.analysis.head_plots import head_map

    head_map({name: array.tolist() for name, array in _values(scores).items()}, layers, path, _title(scores))


def _show(scores: HeadScores, layers: Any, more: Mapping[str, Any]) -> None:
    from prunecli.commands.head_table import head_table
    from prunecli.evaluation.significance import too_few
    from prunecli.methods.heads.effects import LEVEL

    console.show(head_table(_values(scores), layers, _title(scores)))
    if scores.method == "gradient":
        console.out(f"Mean over {scores.examples:,} examples of {scores.task}.")
        return
    console.out(f"{_metric(scores)} of the whole model: {scores.base:.4g}, on {scores.examples:,} examples.")
    few = too_few(more.get("reported", {}).get("examples", scores.examples), "examples")
    if scores.method != "ablation":
        _show_best(scores, more, None if few else LEVEL)
    elif few is None:
        _show_significant(scores, LEVEL)
    if few:
        console.warn(few)


def _show_significant(scores: HeadScores, level: float) -> None:
    import numpy as np

    gained = np.concatenate(
        [scores.sign * (array - (scores.base or 0.0)) for array in scores.values.values()]
    )
    sure = np.concatenate(list(scores.p_values.values())) < level
    console.out(
        f"Without one head: {int((sure & (gained < 0)).sum())} of {len(sure)} make it significantly worse, "
        f"{int((sure & (gained > 0)).sum())} better (p < {level})."
    )


def _show_best(scores: HeadScores, more: Mapping[str, Any], level: float | None) -> None:
    best, base = scores.best(), scores.base or 0.0
    reported = more.get("reported")
    rows = []
    for name, head in best.items():
        place = scores.heads[name].index(head)
        value, p_value = float(scores.values[name][place]), float(scores.p_values[name][place])
        if reported is not None:
            value, p_value, base = reported["only"][name], reported["p_value"][name], reported["base"]
        mark = "*" if level is not None and p_value < level else ""
        rows.append([name, str(head), f"{value:.4g}", f"{value - base:+.4g}{mark}"])
    where = "chosen on other text" if reported is not None else "chosen on the same text"
    columns = ("attention", "head", _metric(scores), "change")
    console.show(console.table(f"The best single head of each layer, {where}", columns, rows))
    if level is not None:
        console.out(f"* differs from the whole model with p < {level}.")
