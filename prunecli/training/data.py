"""The text of a run, the examples and batches made of it, what is minimised, and the validation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Sampler

from prunecli.evaluation.decoding import DecodingOptions, translate
from prunecli.evaluation.scoring import make_metrics, score
from prunecli.model.checkpoint import open_model
from prunecli.processes import ProcessGroup
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.running.encoding import (
    labelled_examples,
    mlm_examples,
    packed_examples,
    text_examples,
    translation_examples,
)
from prunecli.running.examples import IGNORED, Examples, TokenExamples
from prunecli.text.choice import HEADLESS, Text, TextChoice, TrainingTask, all_texts
from prunecli.text.files import lines_sha256
from prunecli.text.parallel import Pairs, ParallelText, has_split, pair_name, read_parallel
from prunecli.text.plain import LabelledText, PlainText
from prunecli.text.tokens import Tokenizer
from prunecli.training.loss import (
    HiddenDistance,
    Objective,
    digest_of_examples,
    load_teacher,
    make_lesson,
    read_logits,
    require_positions,
    write_logits,
)
from prunecli.training.options import LossOptions, TrainingOptions


@dataclass(frozen=True)
class TrainingData:
    """Text to train on and to validate with.

    Attributes:
        train, valid: parallel text for translation, labelled for classification, any for embedding, plain for the
            others; no `valid`, no validation.
        pairs: the directions of translation.
    """

    task: TrainingTask
    train: Text
    valid: Text | None = None
    pairs: Pairs = ()

    def describe(self) -> dict[str, Any]:
        """The values that the result depends on, as JSON."""
        return {
            "task": self.task,
            "train": self.train.sha256,
            "valid": None if self.valid is None else self.valid.sha256,
            **({"whole_files": self.train.whole_files} if isinstance(self.train, PlainText) else {}),
            "pairs": [pair_name(*pair) for pair in self.pairs],
        }

    def identity(self) -> dict[str, Any]:
        """`describe` with the names of the files -> hashes of their lines in place of the hash of each text."""
        files: dict[str, dict[str, str]] = {}
        for key, text in (("train", self.train), ("valid", self.valid)):
            files[key] = {}
            if isinstance(text, ParallelText):
                for name, lines in text.sentences.items():
                    files[key][f"{text.split}.{name}"] = lines_sha256(lines)
            elif text is not None:
                files[key][", ".join(map(str, text.files))] = text.sha256
        return {**self.describe(), **files}


VALID_SPLIT = "val"


def read_training_data(
    task: TrainingTask, choice: TextChoice, valid: TextChoice, say: Say = unsaid
) -> TrainingData:
    """The text that `choice` names for `task`, and that of `valid` to validate with.

    Args:
        valid: its `split`, `files`, `labelled` and `max_sentences` count; of translation without a split "val", where
            there is one.
        say: hears what is taken by default.

    Raises:
        PruneError: text that cannot be used.
    """
    train, pairs = choice.text_of(task, say)
    if isinstance(train, ParallelText):
        data = None if choice.source_file is not None else choice.data or choice.demo
        if data is None or (valid.split is None and not has_split(data, VALID_SPLIT)):
            say(f"No split {VALID_SPLIT!r}, no validation: the last model is the result.")
            return TrainingData(task, train, None, pairs)
        held_out = read_parallel(data, valid.split or VALID_SPLIT, train.languages)
        return TrainingData(task, train, held_out.first(valid.max_sentences), pairs)
    if valid.labelled is None and not valid.files:
        return TrainingData(task, train)
    return TrainingData(task, train, valid.text_of(task)[0])


@dataclass(frozen=True)
class Validation:
    """Held-out text.

    Attributes:
        batch_tokens: padded tokens in a batch.
        objective: what the loss is the mean of, over the scored tokens.
        chrf: returns chrF++ of translations of the text; None: it is not measured.
    """

    examples: Examples
    batch_tokens: int
    objective: Objective
    chrf: Callable[[Any, ProcessGroup], float] | None = None

    def measure(self, model: Any, process_group: ProcessGroup) -> Mapping[str, float]:
        """`loss`: mean of the objective per scored token, in nats; `cosine` to a teacher's vectors; `chrf++`.

        The model is put into evaluation mode.
        """
        model.eval()
        total, count = 0.0, 0
        batches = self.examples.cut(self.batch_tokens)
        for first in range(0, len(batches), process_group.world_size):
            # Where weights are sharded, every process takes part in each forward pass: some run a batch for nothing.
            number = first + process_group.rank
            batch = self.examples.batch(batches[min(number, len(batches) - 1)])
            with torch.no_grad():
                loss = float(self.objective(model, send_to_device(batch.with_labels, model.device)))
            if number < len(batches):
                total += loss
                count += int((batch.labels != IGNORED).sum())
        total, tokens = process_group.all_reduce([total, count])
        loss = total / max(tokens, 1)
        scores = {"loss": loss}
        if self.objective.lesson is not None:
            scores["cosine"] = 1 - loss
        if self.chrf is not None:
            scores["chrf++"] = self.chrf(model, process_group)
        return scores


def make_examples(
    tokenizer: Tokenizer,
    model: Any,
    source: Path,
    data: TrainingData,
    options: TrainingOptions,
    device: torch.device,
    process_group: ProcessGroup,
    report: Say,
    progress: Progress,
) -> tuple[Examples, Objective, Validation | None]:
    """The examples to train on, what is minimised over them, and the validation of the held-out text.

    Args:
        source: directory of the model.
        device: device of the teacher.
        process_group: of which the first process writes the teacher's logits.
        report: hears what `make_lesson` chooses.

    Raises:
        PruneError: the model is for another task, or the text cannot be used.
    """
    lesson = teacher = None
    path, kept = options.teacher or Path(), options.teacher_logits  # the path is named wherever it is read
    if options.teacher is not None and (kept is None or (process_group.is_main and not kept.exists())):
        teacher = load_teacher(options, model, tokenizer, data.task, device)
    if data.task == "embedding":
        lesson = make_lesson(source, model, tokenizer, path, teacher, report)

    def encoded(text: Text, progress: Progress = silent, seed: int = 0) -> Examples:
        if lesson is not None:
            return lesson.examples(tokenizer, model, all_texts(text, data.pairs), options.context)
        if isinstance(text, ParallelText):
            return translation_examples(tokenizer, model, text, data.pairs, progress, skip_blank=True)
        if isinstance(text, LabelledText):
            return labelled_examples(tokenizer, model, text)
        if data.task == "feature-extraction":
            return text_examples(tokenizer, model, text.texts, options.context)
        if data.task == "mlm":
            return mlm_examples(tokenizer, model, text.texts, context=options.context, seed=seed)
        return packed_examples(tokenizer, model, text.texts, options.context, apart=not text.whole_files)

    def objective(loss: LossOptions) -> Objective:
        return HiddenDistance(loss, teacher, lesson) if data.task in HEADLESS else Objective(loss, teacher)

    def chrf(model: Any, process_group: ProcessGroup) -> float:
        """Mean chrF++ of the translations of the held-out text."""
        assert isinstance(data.valid, ParallelText)
        metrics, found = {"chrf++": make_metrics(None)["chrf++"]}, []
        decoding = DecodingOptions(options.beam, options.batch_tokens)
        for pair in data.pairs:
            sources, references = (data.valid.sentences[name] for name in pair)
            made = translate(model, tokenizer, sources, pair, decoding, process_group=process_group)
            found.append(score(made, references, metrics)["chrf++"])
        return sum(found) / len(found)

    examples = encoded(data.train, progress, options.seed)
    if teacher is not None:
        require_positions(path, teacher, examples)
    if kept is not None:
        with open_model(path) as opened:
            digest = digest_of_examples(examples, opened.fingerprint)
        if teacher is not None:
            write_logits(kept, digest, teacher, examples, options.batch_tokens, progress)
            teacher = None
        process_group.all_gather(None)
        assert isinstance(examples, TokenExamples)
        examples = replace(examples, more=read_logits(kept, digest))
    if data.valid is None:
        return examples, objective(options.loss), None
    translated = chrf if options.metric == "chrf++" else None
    # Held-out text is measured by cross-entropy, cosines or hidden states, each alone.
    alone = options.loss if data.task == "feature-extraction" else LossOptions(label_smoothing=0.0)
    validation = Validation(encoded(data.valid), options.batch_tokens, objective(alone), translated)
    return examples, objective(options.loss), validation


@dataclass(eq=False)
class BucketSampler(Sampler[list[int]]):
    """The batches of one process: rows of examples of like lengths, of at most `batch_tokens` padded tokens.

    Sentences of equal lengths change places from epoch to epoch, and so do the batches. Both depend on the seed and
    the epoch alone, so that every process cuts the same batches and a resumed run sees those that are left. What does
    not divide among the processes waits for another epoch.

    Attributes:
        examples: told of each epoch before its first batch.
        batch_tokens: padded tokens of the longer side.
        seed: of the order.
        rank: number of this process.
        processes: how many there are.
    """

    examples: Examples
    batch_tokens: int
    seed: int
    rank: int = 0
    processes: int = 1
    epoch: int = 0

    def __post_init__(self) -> None:
        # The cut depends on the sorted lengths, so that every epoch has as many batches.
        self.count = len(self.examples.cut(self.batch_tokens)) // self.processes

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Which order the next iteration has; the Trainer calls it."""
        self.epoch = epoch
        self.examples.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.examples.lengths)).tolist()
        batches = self.examples.cut(self.batch_tokens, order)
        shuffled = random.permutation(len(batches)).tolist()[: self.count * self.processes]
        for number in shuffled[self.rank :: self.processes]:
            yield batches[number]


def loader(sampler: BucketSampler, *, pin: bool = False) -> Any:
    """A DataLoader with batches of the sampler's examples as the model takes them."""
    examples = sampler.examples
    rows: Any = range(len(examples.lengths))
    # A generator of its own: a loader draws from it at its start, which must not move that of dropout.
    made = DataLoader(
        rows,
        batch_sampler=sampler,
        collate_fn=lambda numbers: examples.batch(numbers).with_labels,
        generator=torch.Generator().manual_seed(sampler.seed),
        pin_memory=pin,
    )
    made.set_epoch = sampler.set_epoch  # called by the Trainer before each epoch
    return made
