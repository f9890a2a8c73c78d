"""Score the heads of a checkpoint on text within given resources, by any of the three methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from prunecli.choices import Choices
from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.evaluation.options import labels_for
from prunecli.methods.heads.measure import (
    AblationOptions,
    LoadedModel,
    check_metric,
    report_best,
    score_by_ablation,
    score_by_gradient,
)
from prunecli.methods.heads.names import EffectMetric
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.modules.devices import Devices, choose_devices
from prunecli.modules.fitting import decoding, decoding_room, fitting_dtype, nothing
from prunecli.modules.loading import load_model
from prunecli.modules.precision import candidates, dtype_name
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.header import header
from prunecli.results.heads import HeadScores, Method, Per
from prunecli.running.layerwise.runner import Layerwise, Resources, RunReport
from prunecli.running.runner import InMemory, Runner
from prunecli.tensors.documents import refuse_unwritable, write_json
from prunecli.text.choice import TextChoice
from prunecli.text.plain import PlainText
from prunecli.text.tasks import TaskName, task_of
from prunecli.text.tokens import load_tokenizer


@dataclass(frozen=True)
class ScoreOptions(Choices):
    """How heads are scored.

    Attributes:
        method: `gradient` (4.1): one forward and backward pass; `ablation` (3.2): the score without each head;
            `all-but-one` (3.3): with each head alone in its layer.
        per: what `gradient` takes the absolute value of; None: each example's sum, as eq. 2 says.
        metric: the score of the other two; None: chrF++, accuracy, cosine or loss, by task.
        beam: of the search that chrF++ and BLEU need.
        batch_tokens: padded tokens in a batch.
        samples: resamples of the significance test of chrF++ and BLEU.
        seed: of the resamples.
        select_data, select_split: text that `all-but-one` chooses the best heads on, where it reports them on another.
        device, dtype: as in `load_model`.
        memory: bytes within which `gradient` runs the model layer by layer; None: it is held whole.
        spill_directory: for what finds no room in it; None: the one for temporary files.
    """

    method: Method = "gradient"
    per: Per | None = None
    metric: EffectMetric | None = None
    beam: int = 4
    batch_tokens: int = 4096
    samples: int = 1000
    seed: int = 12345
    select_data: Path | None = None
    select_split: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    memory: int | None = None
    spill_directory: Path | None = None

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            UsageError: options of another method.
        """
        is_gradient = self.method == "gradient"
        if is_gradient and self.dtype == "float16":
            raise UsageError(
                "--dtype float16: small gradients vanish in it",
                "Choose bfloat16 or float32 for --method gradient.",
            )
        if not is_gradient and self.memory is not None:
            raise UsageError(
                f"--memory goes with --method gradient: {self.method} runs parts of the model again and again",
                "Leave out --memory on a machine that holds the model, or choose --method gradient.",
            )
        if not is_gradient and self.per is not None:
            raise UsageError(
                f"--importance goes with --method gradient: {self.method} takes no gradients",
                "Leave out --importance, or choose --method gradient.",
            )
        if is_gradient and self.metric is not None:
            raise UsageError(
                "--metric goes with --method ablation or all-but-one: the gradient is that of the loss",
                "Leave out --metric, or choose another --method.",
            )
        selects = self.select_data is not None or self.select_split is not None
        if self.method != "all-but-one" and selects:
            raise UsageError(
                "--select-data and --select-split go with --method all-but-one",
                "Leave them out, or choose it.",
            )


def score_heads(
    model: Checkpoint | Path | str,
    choice: TextChoice,
    options: ScoreOptions | None = None,
    output: str | Path | None = None,
    *,
    task: TaskName | None = None,
    force: bool = False,
    progress: Progress = silent,
    say: Say = unsaid,
    report: Callable[[RunReport], None] = lambda _run: None,
) -> HeadScores:
    """What the model loses without each of its attention heads (1905.10650, 3 and 4.1).

    Args:
        model: an open model, a directory or a name of the hub.
        choice: of the text.
        output: file that the scores are written to; None: none.
        task: None: what the model is for.
        force: replace `output`.
        say: hears what is chosen by itself, and why.
        report: called with what a run layer by layer took.

    Raises:
        PruneError: a model, text, option or output that cannot be used.
    """
    options = options or ScoreOptions()
    options.check()
    if output is not None:
        refuse_unwritable(Path(output), force=force)
    checkpoint = model if isinstance(model, Checkpoint) else open_model(model)
    _ = checkpoint.layout.attentions  # a family that is not declared is refused before anything heavy
    task = task or task_of(checkpoint)
    choice.check(task)
    data = choice.read(task, say)
    selecting = choice.selecting(task, options.select_data, options.select_split)
    selected = None if selecting is None else selecting.read(task, say)
    ablation = AblationOptions(
        check_metric(task, options.metric),
        DecodingOptions(options.beam, options.batch_tokens),
        options.samples,
        options.seed,
    )
    devices = choose_devices(options.device)
    dtype = _dtype(checkpoint, options, ablation, devices, say)
    tokenizer = load_tokenizer(checkpoint.path)
    if options.method == "gradient":
        run = RunReport()
        runner: Runner
        if options.memory is not None:
            resources = Resources(devices.first, dtype, options.memory, options.spill_directory)
            runner = Layerwise(checkpoint, resources, run)
        else:
            runner = InMemory(load_model(checkpoint.path, device=devices, dtype=dtype))
        scores = score_by_gradient(
            runner, checkpoint, tokenizer, data, options.batch_tokens, progress, per=options.per or "example"
        )
        if options.memory is not None:
            report(run)
    else:
        room = decoding_room(checkpoint, ablation.decoding.load, dtype)
        model_held = load_model(checkpoint.path, device=devices, dtype=dtype, room=room)
        loaded = LoadedModel(checkpoint, model_held, tokenizer)
        scores, *others = score_by_ablation(
            loaded, selected or data, options.method, ablation, progress
        ).values()
        best = None if selected is None else report_best(loaded, data, scores.best(), ablation, progress)
        scores = replace(scores, also=tuple(others), reported=best)
    whole_files = data.text.whole_files if isinstance(data.text, PlainText) else None
    scores = replace(
        scores,
        dtype=dtype_name(dtype),
        texts=choice.texts,
        split=choice.split_read,
        whole_files=whole_files,
    )
    if output is not None:
        write_json(Path(output), scores_document(scores, checkpoint, options), force=force)
    return scores


def scores_document(scores: HeadScores, checkpoint: Checkpoint, options: ScoreOptions) -> dict[str, object]:
    """What heads.json holds: the scores behind the header of every result."""
    seed = None if options.method == "gradient" else options.seed
    return {**header(scores.FORMAT, [checkpoint], seed), **scores.to_json()}


def _dtype(
    checkpoint: Checkpoint, options: ScoreOptions, ablation: AblationOptions, devices: Devices, say: Say
) -> torch.dtype:
    gradients = options.method == "gradient"
    if options.memory is not None:
        return candidates(options.dtype, [checkpoint], devices.first, gradients=gradients)[0]
    return fitting_dtype(
        dict.fromkeys(labels_for([checkpoint.path]), checkpoint),
        devices,
        options.dtype,
        beside=nothing if gradients else decoding(ablation.decoding.load),
        gradients=gradients,
        by_layer="--memory" if gradients else "",
        say=say,
    )
