"""One training run, from open checkpoint and text to weights that are ready to be written."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prunecli.checkpoint.reader import Checkpoint, open_checkpoint
from prunecli.data.labelled import LabelledText
from prunecli.data.parallel import ParallelText, pair_name
from prunecli.data.plain import PlainText
from prunecli.data.tokens import Tokenizer, language_id, languages, load_tokenizer
from prunecli.errors import UsageError
from prunecli.evaluation.decoding import DecodingOptions
from prunecli.evaluation.losses import TaskName
from prunecli.modules.loading import load_model
from prunecli.processes import Place
from prunecli.progress import Progress, silent
from prunecli.training.batches import BucketSampler, require_batch
from prunecli.training.examples import Examples, labelled, texts, translations
from prunecli.training.loss import Objective
from prunecli.training.options import TrainingOptions
from prunecli.training.result import stage
from prunecli.training.state import (
    finished,
    last_checkpoint,
    load_weights,
    mark_finished,
    prepare_state,
    trainer_state,
)
from prunecli.training.teacher import load_teacher
from prunecli.training.trainer import FinetuneTrainer, training_arguments
from prunecli.training.validation import Translating, Validation
from prunecli.training.watch import Report, Watch

NO_END = 1 << 40
"""Updates of a run that time alone ends."""

Text = ParallelText | PlainText | LabelledText


@dataclass(frozen=True)
class Material:
    """What is trained on.

    Attributes:
        train, valid: parallel text for translation, labelled for classification, plain for lm; no `valid`, no
            validation.
        pairs: the directions of translation.
    """

    task: TaskName
    train: Text
    valid: Text | None = None
    pairs: tuple[tuple[str, str], ...] = ()

    def describe(self) -> dict[str, Any]:
        """What the result depends on, as JSON."""
        return {
            "task": self.task,
            "train": _digest(self.train),
            "valid": None if self.valid is None else _digest(self.valid),
            "pairs": [pair_name(*pair) for pair in self.pairs],
        }


def _digest(text: Text) -> str:
    if isinstance(text, ParallelText):
        lines = {
            name: hashlib.sha256("\n".join(text.sentences[name]).encode()).hexdigest()
            for name in text.languages
        }
        return hashlib.sha256(json.dumps(lines, sort_keys=True).encode()).hexdigest()
    return text.sha256


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        staged: directory with the trained weights; on the first process only.
        log: figures: steps, tokens per second, losses, validations.
        is_first: whether this process writes the result.
    """

    staged: Path
    log: Mapping[str, Any]
    is_first: bool


def finetune(
    source: Callable[[], Checkpoint],
    material: Material,
    options: TrainingOptions,
    state: Path,
    *,
    origin: Mapping[str, Any],
    resume: bool = True,
    progress: Progress = silent,
    report: Report = lambda _line: None,
) -> Trained:
    """Train, keeping the state in `state`; a run that was interrupted goes on from there, to the same result.

    Every one of several processes calls this; only the first reports.

    Args:
        source: opens the checkpoint, once `state` is there.
        state: see `prunecli.training.state`.
        origin: what `source` opens, as JSON.
        resume: go on from what `state` holds; else begin anew.
        report: called with a line at each validation.

    Raises:
        PruneError: model, text, teacher or options that cannot be used; a loss that is not finite.
        KeyboardInterrupt: a signal ended the training; its state is kept.
    """
    arguments = training_arguments(options, state, validates=material.valid is not None)
    place = Place(arguments.process_index, arguments.world_size)
    is_first = place.rank == 0
    silently: Report = lambda _line: None  # noqa: E731
    report = report if is_first else silently
    if is_first:
        identity = {**origin, **material.describe(), **_identity(options), "processes": place.processes}
        prepare_state(state, identity, resume=resume)
    try:
        if is_first:
            source().close()
        place.gathered(None)  # the first has made what the others open
        return _trained(source, material, options, arguments, place, state, progress, report)
    finally:
        if is_first and last_checkpoint(state) is None:  # nothing that a later run could go on from
            shutil.rmtree(state, ignore_errors=True)


def _trained(
    source: Callable[[], Checkpoint],
    material: Material,
    options: TrainingOptions,
    arguments: Any,
    place: Place,
    state: Path,
    progress: Progress,
    report: Report,
) -> Trained:
    with source() as checkpoint:
        checkpoint.require_architecture()
        tokenizer = load_tokenizer(checkpoint.path)
        for language in {name for pair in material.pairs for name in pair} if languages(tokenizer) else ():
            language_id(tokenizer, language)
        model = load_model(checkpoint.path, device="cpu", dtype="float32")
        if arguments.device.type == "cpu" and options.dtype == "bfloat16":
            # torch's fused attention is slow there: of an update of a 6 + 6 layer model it takes a quarter.
            model.set_attn_implementation("eager")
        _require_tokens(tokenizer, model, checkpoint)
        done = finished(state)
        if done is not None and done["target"] != _target(options):
            done = None
        if done is None or not Path(done["weights"]).is_dir():
            done = _train(model, tokenizer, material, options, arguments, place, state, progress, report)
        else:
            report("The training had ended before; writing its result.")
            load_weights(model, Path(done["weights"]))
        staged = state / "result"
        if place.rank == 0:
            stage(model, checkpoint, staged)
    log = {key: done[key] for key in done if key not in ("format", "weights", "target")}
    return Trained(staged, log, place.rank == 0)


def _train(
    model: Any,
    tokenizer: Tokenizer,
    material: Material,
    options: TrainingOptions,
    arguments: Any,
    place: Place,
    state: Path,
    progress: Progress,
    report: Report,
) -> dict[str, Any]:
    """Train to the end; the model then has the weights of the result."""
    examples = encode_examples(tokenizer, model, material, material.train)
    require_batch(examples, options.batch_tokens, options.accumulate * place.processes)
    validation = _validation(tokenizer, model, material, options)
    teacher = None
    if options.teacher is not None:
        dtype = "bfloat16" if options.dtype == "bfloat16" else "float32"
        teacher = load_teacher(
            options.teacher, model, tokenizer, material.task, options.loss, arguments.device, dtype
        )
    steps = arguments.max_steps = _steps(examples, options, place)
    limit = None if options.minutes is None else 60 * options.minutes
    total = None if steps == NO_END else steps
    with (progress if place.rank == 0 else silent)("training", total, "steps") as advance:
        watch = Watch(place, limit=limit, advance=advance, report=report)
        trainer = FinetuneTrainer(
            model, arguments, examples, Objective(options.loss, teacher), validation, options, watch
        )
        last = last_checkpoint(state)
        if last is not None:
            report(f"Going on from step {trainer_state(last)['global_step']:,} in {state}.")
            trainer.restore(trainer_state(last))
        if last is not None and trainer_state(last)["global_step"] >= steps:
            trainer.adopt(last)
        else:
            with watch.signals():
                trainer.train(resume_from_checkpoint=None if last is None else str(last))
    if watch.interrupted:
        report(
            f"Stopped after step {trainer.state.global_step:,}: {state} is kept; the same command goes on from it."
        )
        raise KeyboardInterrupt
    best = trainer.state.best_model_checkpoint
    weights = Path(best) if validation is not None and best else last_checkpoint(state)
    assert weights is not None
    done = {**_log(trainer, options), "weights": str(weights), "target": _target(options)}
    if place.rank == 0:
        mark_finished(state, done)
    return done


def encode_examples(tokenizer: Tokenizer, model: Any, material: Material, text: Text) -> Examples:
    """The examples of the material's task in `text`.

    Raises:
        PruneError: the model is for another task, or the text cannot be used.
    """
    if isinstance(text, ParallelText):
        return translations(tokenizer, model, text, material.pairs)
    if isinstance(text, LabelledText):
        return labelled(tokenizer, model, text)
    return texts(tokenizer, model, text.texts)


def _validation(
    tokenizer: Tokenizer, model: Any, material: Material, options: TrainingOptions
) -> Validation | None:
    if material.valid is None:
        return None
    translating = None
    if options.metric == "chrf++":
        assert isinstance(material.valid, ParallelText)
        decoding = DecodingOptions(options.beam, options.batch_tokens)
        translating = Translating(material.valid, material.pairs, tokenizer, decoding)
    examples = encode_examples(tokenizer, model, material, material.valid)
    return Validation(examples, options.batch_tokens, translating)


def _steps(examples: Examples, options: TrainingOptions, place: Place) -> int:
    """Updates of the whole run."""
    if options.steps is not None:
        return options.steps
    if options.epochs is None and options.minutes is not None:
        return NO_END
    sampler = BucketSampler(examples.lengths, options.batch_tokens, options.seed, place.rank, place.processes)
    return max(1, math.ceil((options.epochs or 1) * math.ceil(len(sampler) / options.accumulate)))


def _require_tokens(tokenizer: Tokenizer, model: Any, checkpoint: Checkpoint) -> None:
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= model.config.vocab_size:
        raise UsageError(
            f"{checkpoint.path}: the tokenizer has ids up to {highest:,}, the model {model.config.vocab_size:,} tokens",
            "Tokenizer and model are not of one checkpoint; copy both again.",
        )


def _identity(options: TrainingOptions) -> dict[str, Any]:
    """The options that the weights after a given number of updates depend on."""
    free = ("steps", "epochs", "minutes", "patience", "device", "teacher")
    values = {key: value for key, value in asdict(options).items() if key not in free}
    teacher = None
    if options.teacher is not None:
        with open_checkpoint(options.teacher) as opened:
            teacher = opened.fingerprint
    return {**values, **values.pop("loss"), "teacher": teacher}


def _target(options: TrainingOptions) -> list[Any]:
    """What decides when a run ends; a run that ended for one target goes on for another."""
    return [options.steps, options.epochs, options.minutes, options.patience]


def _log(trainer: FinetuneTrainer, options: TrainingOptions) -> dict[str, Any]:
    """The figures of a finished training."""
    history: Sequence[Mapping[str, Any]] = trainer.state.log_history
    training = [
        {"step": row["step"], "loss": round(row["loss"], 6), "learning_rate": row["learning_rate"]}
        for row in history
        if "loss" in row
    ]
    validation = [
        {
            "step": row["step"],
            **{key.removeprefix("eval_"): round(row[key], 6) for key in row if key.startswith("eval_")},
        }
        for row in history
        if "eval_loss" in row
    ]
    best = trainer.state.best_metric
    return {
        "steps": trainer.state.global_step,
        "epochs": round(trainer.state.epoch or 0.0, 4),
        "metric": options.metric if validation else None,
        "best": None
        if best is None
        else {"step": trainer.state.best_global_step, options.metric: round(best, 6)},
        "tokens": trainer.watch.tokens,
        "seconds": round(trainer.watch.seconds, 3),
        "tokens_per_second": round(trainer.watch.tokens_per_second, 1),
        "parameters": sum(held.numel() for held in trainer.model.parameters()),
        "training": training,
        "validation": validation,
    }
