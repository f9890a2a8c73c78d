"""What is minimised: label-smoothed cross-entropy, and the distance to a teacher.

Over the N scored tokens of an update, with logits z of the model, z' of the teacher and p = softmax(z):

    L = 1/N sum_t [ (1 - w) CE_t + w T^2 KL_t + h MSE_t ]
    CE_t = -(1 - e) log p_t(y_t) - e/V sum_v log p_t(v)                       (label smoothing e)
    KL_t = sum_v q_t(v) (log q_t(v) - log s_t(v)), q = softmax(z'/T), s = softmax(z/T)
    MSE_t = mean over the width of the squared difference of the last hidden states

A mixture of experts adds a x its stock class's term for even use of all experts, where config.json asks for that
(`output_router_logits`; a is `router_aux_loss_coef`), in training alone.

The hidden states are those of the decoder, or of the only stack; an encoder's are compared too where there are both,
each over its own real tokens, scaled so that a token of the input weighs as much as one of the output. Models without a
head learn the last hidden states of a teacher alone, or the vectors of its texts.

A teacher's likeliest tokens at every scored position of the training text may be computed once and kept in a file: the
k largest log probabilities, as float16. The others share evenly what is left of the teacher's probability, so that KL_t
needs no teacher in memory.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from prunecli.errors import DataError, UsageError
from prunecli.model.checkpoint import directory_of, open_model
from prunecli.modules.loading import load_model
from prunecli.modules.logits import Logits, vocabulary_size
from prunecli.modules.pooling import Pooling, read_pooling
from prunecli.progress import Progress, Say, unsaid
from prunecli.running.encoding import embedding_examples, position_count, require_task
from prunecli.running.examples import IGNORED, Examples
from prunecli.tensors.transaction import new_file, refuse_output
from prunecli.text.choice import HEADLESS, TrainingTask
from prunecli.text.tokens import Tokenizer, load_tokenizer
from prunecli.training.options import LossOptions, TrainingOptions

BALANCES = "router_aux_loss_coef", "aux_loss_coef"
"""What classes call the weight of the term for even use of experts, or their configs where the classes have none."""


@dataclass
class Objective:
    """The loss of a batch, as a sum over its scored tokens.

    Attributes:
        options: weights.
        teacher: in evaluation mode, on the model's device; None: what the batches hold of it, or cross-entropy alone.
        lesson: how texts become vectors; None: logits or hidden states are all that is compared.
        in_blocks: False for sharded weights: the processes would differ in their numbers of blocks.
    """

    options: LossOptions
    teacher: Any = None
    lesson: "Lesson | None" = None
    in_blocks = True

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum over the scored tokens of `batch` (see `Batch.with_labels`), differentiable, float32."""
        known: Any = batch.get(TAUGHT)
        inputs: dict[str, Any] = own_inputs(batch)
        labels, options = batch["labels"], self.options
        kept = labels != IGNORED
        targets = labels[kept]
        has_teacher = self.teacher is not None and (options.distill > 0 or options.hidden > 0)
        if has_teacher and options.hidden:
            inputs["output_hidden_states"] = True
        logits = Logits(model, inputs, kept, in_blocks=self.in_blocks)
        taught = None
        if has_teacher:
            with torch.no_grad():
                taught = Logits(self.teacher, inputs, kept)

        def loss(number: int, place: slice) -> Tensor:
            own = logits.block(number)
            total = functional.cross_entropy(
                own.float(), targets[place], label_smoothing=options.label_smoothing, reduction="sum"
            )
            if not options.distill or (taught is None and known is None):
                return total
            with torch.no_grad():
                if taught is not None:
                    other = taught.block(number)
                else:
                    other = whole_logits(known[LOG_PROBABILITIES][place], known[TOKENS][place], own.shape[-1])
            divergence = distillation(own, other, options.temperature)
            return (1 - options.distill) * total + options.distill * divergence

        total = torch.stack(logits.each(loss)).sum()
        if taught is not None and options.hidden:
            total = total + options.hidden * hidden_distance(logits.outputs, taught.outputs, batch)
        if model.training and (balance := getattr(logits.outputs, "aux_loss", None)) is not None:
            stock = getattr(model, "module", model)
            places = product((stock, stock.config.get_text_config()), BALANCES)
            weight = next(getattr(place, name) for place, name in places if hasattr(place, name))
            total = total + weight * kept.sum() * balance
        return total


def distillation(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Sum of T^2 KL_t over the scored tokens; both logits are `[tokens, vocabulary]`."""
    student = functional.log_softmax(logits.float() / temperature, -1)
    teacher = functional.log_softmax(taught.float() / temperature, -1)
    return temperature**2 * functional.kl_div(student, teacher, reduction="sum", log_target=True)


def hidden_distance(outputs: Any, taught: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum over the scored tokens of the mean squared difference of the last hidden states."""
    labels = batch["labels"]
    scored, real = labels != IGNORED, batch["attention_mask"].bool()
    decoder = getattr(outputs, "decoder_hidden_states", None)
    if decoder is None:
        own, other = outputs.hidden_states[-1], taught.hidden_states[-1]
        if labels.dim() > 1:
            return _distance(own, other, scored)
        return _distance(own, other, real) / real.sum() * len(labels)
    output = _distance(decoder[-1], taught.decoder_hidden_states[-1], scored)
    encoder = _distance(outputs.encoder_last_hidden_state, taught.encoder_last_hidden_state, real)
    return output + encoder / real.sum() * scored.sum()


def _distance(student: Tensor, teacher: Tensor, chosen: Tensor) -> Tensor:
    difference = (student.float() - teacher.float()).square().mean(dim=-1)
    return (difference * chosen).sum()


COMPARED = ("decoder_start_token_id", "pad_token_id")
"""Keys of both configs that shape what the models are given."""


def choose_attention(model: Any, device: torch.device, dtype: str) -> None:
    """Have `model` run the attention that is fastest here.

    On a CPU in bfloat16 torch's fused one is slow: of an update of a 6 + 6 layer model it takes a quarter.
    """
    if device.type == "cpu" and dtype == "bfloat16":
        model.set_attn_implementation("eager")


def load_teacher(
    options: TrainingOptions, student: Any, tokenizer: Any, task: TrainingTask, device: torch.device
) -> Any:
    """The teacher in evaluation mode, on `device`, its weights frozen.

    Raises:
        UsageError: another vocabulary, or other special tokens, where vectors of texts are not all that is compared;
            other classes of a classifier; another width where hidden states are.
        PruneError: it cannot be loaded, or is for another task.
    """
    path, dtype = options.teacher, options.dtype
    assert path is not None
    with open_model(path) as checkpoint:
        directory, size = checkpoint.path, checkpoint.config.get("vocab_size")
    by_token = task != "embedding" or options.loss.hidden > 0
    same_tokens = "A teacher must predict the same tokens: name a model with the same tokenizer."
    if by_token:
        own_size = vocabulary_size(student.config)
        if None not in (size, own_size) and size != own_size:
            raise UsageError(
                f"{path}: the teacher has a vocabulary of {size:,}, the model one of {own_size:,}",
                same_tokens,
            )
        theirs, ours = load_tokenizer(directory).get_vocab(), tokenizer.get_vocab()
        if odd := [token for token in {*theirs, *ours} if theirs.get(token) != ours.get(token)]:
            token = min(odd)
            raise UsageError(
                f"{path}: the teacher has another vocabulary: {len(odd):,} tokens differ, such as {token!r} "
                f"({theirs.get(token)}, the model's is {ours.get(token)})",
                same_tokens,
            )
    teacher = load_model(directory, device=device, dtype=dtype).requires_grad_(False)
    if task != "feature-extraction":
        require_task(teacher, task)
    teacher.config.use_cache = False
    choose_attention(teacher, device, dtype)
    classes = ("id2label",) if task == "classification" else ()
    for key in (*COMPARED, *classes) if by_token else ():
        own, other = getattr(student.config, key, None), getattr(teacher.config, key, None)
        if own != other:
            raise UsageError(
                f"{path}: the teacher's {key} is {other}, the model's is {own}",
                "A teacher must have the same tokens and classes: name another one.",
            )
    if options.loss.hidden:
        own, other = (getattr(model.config, "hidden_size", None) for model in (student, teacher))
        if own != other:
            raise UsageError(
                f"{path}: the teacher's hidden states are {other} wide, the model's {own}",
                "Leave out `hidden_weight`, or name a teacher of the same width.",
            )
    return teacher


def require_positions(path: Path, teacher: Any, examples: Examples) -> None:
    """Refuse a teacher that cannot read what the model is trained on.

    Raises:
        UsageError: an example is longer than its positions.
    """
    longest, positions = max(max(lengths) for lengths in examples.lengths), position_count(teacher)
    if positions is not None and longest > positions:
        raise UsageError(
            f"{path}: the teacher has {positions:,} positions, an example has {longest:,} tokens",
            f"Choose `context={positions}` for a language model, or leave longer sentences out.",
        )


TAUGHT = "taught"
"""Name in a batch of a teacher's inputs, if they differ; or of its likeliest tokens."""


def own_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of the model that learns."""
    return {name: value for name, value in batch.items() if name not in ("labels", TAUGHT)}


@dataclass(frozen=True)
class Lesson:
    """How texts become vectors.

    Attributes:
        teacher: in evaluation mode.
        pooling, taught: the model's and the teacher's.
        tokenizer: the teacher's, where a text falls into other tokens than the model's; None: into the same.
    """

    teacher: Any
    pooling: Pooling
    taught: Pooling
    tokenizer: Tokenizer | None

    def examples(
        self, tokenizer: Tokenizer, model: Any, texts: Sequence[str], context: int | None = None
    ) -> Examples:
        """The tokens of each text, and the teacher's tokens if they differ.

        Raises:
            PruneError: as `embedding_examples`.
        """
        own = embedding_examples(tokenizer, model, self.pooling, texts, context)
        if self.tokenizer is None:
            return own
        taught = embedding_examples(self.tokenizer, self.teacher, self.taught, texts, context)
        return replace(
            own,
            equal=own.equal or taught.equal,
            more=lambda rows: {TAUGHT: taught.batch(rows).inputs},
            beside=taught.ids,
        )


def make_lesson(
    source: Path, model: Any, tokenizer: Tokenizer, path: Path, teacher: Any, say: Say = unsaid
) -> Lesson:
    """Prepare how the model in `source` learns vectors of texts from the teacher in `path`.

    Args:
        say: hears how texts are pooled where the model does not say it, and that vocabularies differ.

    Raises:
        UsageError: the teacher's vectors have another width.
        PruneError: a pooling that cannot be used.
    """
    directory = directory_of(path)
    pooling, taught = read_pooling(source, say), read_pooling(directory)
    own, other = pooling.width(model.config.hidden_size), taught.width(teacher.config.hidden_size)
    if own != other:
        raise UsageError(
            f"{path}: the teacher's vectors are {other:,} wide, the model's {own:,}",
            "Name a teacher with vectors of the same width.",
        )
    words = load_tokenizer(directory)
    if words.get_vocab() == tokenizer.get_vocab():
        words = None
    else:
        say(f"{path} has another vocabulary: it reads each text in its own tokens.")
    return Lesson(teacher, pooling, taught, words)


@dataclass
class HiddenDistance(Objective):
    """Distance of a model without a head to its teacher: h MSE, and with a lesson the sum over texts of 1 - cos(v, v').

    MSE is the sum over the real tokens of the mean squared difference of the last hidden states, with a lesson their
    mean times the texts; v and v' are the vectors of the model and of the teacher.

    Attributes:
        options: `hidden` is h, 0 where the teacher reads other tokens.
        teacher: in evaluation mode.
    """

    def __call__(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """See `Objective`."""
        inputs = own_inputs(batch)
        others: Any = batch.get(TAUGHT, inputs)
        own = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            other = self.teacher(**others, output_hidden_states=True)
        distances = []
        if self.lesson is not None:
            vectors = self.lesson.pooling(own.hidden_states[-1], inputs["attention_mask"])
            targets = self.lesson.taught(other.hidden_states[-1], others["attention_mask"])
            distances.append((1 - functional.cosine_similarity(vectors, targets)).sum())
        if self.options.hidden:
            distances.append(self.options.hidden * hidden_distance(own, other, batch))
        return torch.stack(distances).sum()


KEPT = 64
"""Tokens of a position that are kept: k."""

LOG_PROBABILITIES, TOKENS = "teacher_log_probabilities", "teacher_tokens"
"""Of a batch, and in the file: `[positions, k]` float16 and int32, of the scored positions in their order."""


def whole_logits(log_probabilities: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """Logits `[positions, vocabulary]` float32 of a distribution of which only the k likeliest tokens are known.

    Args:
        log_probabilities: `[positions, k]`.
        tokens: `[positions, k]`.
        vocabulary: at least k.
    """
    known = log_probabilities.float()
    rest = (1 - known.exp().sum(1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps)
    others = max(vocabulary - tokens.shape[1], 1)
    filled = (rest.log() - math.log(others)).expand(-1, vocabulary)
    return filled.scatter(1, tokens.long(), known)


def check_logits_file(path: Path, task: TrainingTask) -> None:
    """For a command's beginning, so that long work does not end at a file that cannot be used or written.

    Raises:
        UsageError: more is learned of a teacher in `task` than logits, or they change from epoch to epoch.
        OutputError: `path` is no file, or lies where none can be written.
    """
    if task == "mlm" or task in HEADLESS:
        raise UsageError(
            f"`teacher_logits` does not go with `task={task}`",
            "Leave it out: the teacher runs with the model.",
        )
    refuse_output(path, "file", force=True)


def digest_of_examples(examples: Examples, teacher: str) -> str:
    """A hash of the examples' tokens and labels, and of the teacher's fingerprint."""
    digest = hashlib.sha256(teacher.encode())
    for row in range(len(examples.lengths)):
        for tensor in examples.batch([row]).with_labels.values():
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def read_logits(path: Path, digest: str) -> Callable[[Sequence[int]], dict[str, Any]]:
    """Read a file of logits: `[positions, k]` float16, the largest first, and int32; and where each example begins.

    Args:
        digest: see `digest_of_examples`.

    Returns:
        The function that makes the inputs for a batch from the numbers of its examples.

    Raises:
        DataError: the file is damaged, or of another text or teacher.
    """
    try:
        with safe_open(path, "pt") as file:
            kept = file.metadata()
            found = {name: file.get_tensor(name) for name in (LOG_PROBABILITIES, TOKENS)}
            ends = file.get_tensor("ends").tolist()
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: holds no teacher's logits ({error})", "Name another file.") from error
    if kept != {"digest": digest}:
        raise DataError(
            f"{path}: these are logits of another teacher, or for another text or tokenizer",
            "Name a file that is not there yet: it is written.",
        )

    def inputs(rows: Sequence[int]) -> dict[str, Any]:
        spans = [slice(ends[row], ends[row + 1]) for row in rows]
        return {TAUGHT: {name: torch.cat([held[span] for span in spans]) for name, held in found.items()}}

    return inputs


@torch.no_grad()
def write_logits(
    path: Path, digest: str, teacher: Any, examples: Examples, batch_tokens: int, progress: Progress
) -> None:
    """Run the teacher on all examples and write the file; it appears once it is whole."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    batches = examples.batches(batch_tokens)
    with progress("the teacher's logits", len(batches), "batches") as advance:
        for batch in batches:
            scored = batch.labels != IGNORED
            made = Logits(teacher, batch.arguments(teacher), scored.to(teacher.device))

            def likeliest(number: int, _place: slice, made: Logits = made) -> Tensor:
                logits = made.block(number).float().log_softmax(-1)
                values, tokens = logits.topk(min(KEPT, logits.shape[-1]))
                return torch.stack([values, tokens.float()])  # ids are exact up to 16 million

            values, tokens = torch.cat(made.each(likeliest), 1).cpu()
            counts = scored.view(len(scored), -1).sum(1).tolist()
            parts = zip(values.half().split(counts), tokens.int().split(counts), strict=True)
            found |= dict(zip(batch.indices, parts, strict=True))
            advance(1)
    ordered = [found[row] for row in range(len(found))]
    lengths = torch.tensor([0, *(len(values) for values, _ in ordered)])
    tensors = {
        LOG_PROBABILITIES: torch.cat([values for values, _ in ordered]),
        TOKENS: torch.cat([tokens for _, tokens in ordered]),
        "ends": lengths.cumsum(0),
    }
    with new_file(path) as begun:
        save_file(tensors, begun, {"digest": digest})
