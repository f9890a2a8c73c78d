"""What training begins with, and what a run keeps on disk, so that the same command goes on after an interrupt.

OUTPUT.training/
    run.json        what the result depends on
    initial/        the random weights of a run from scratch
    checkpoint-N/   after N updates: weights, optimizer, schedule, random numbers, the Trainer's state
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, TrainerState

from prunecli.architectures import NLLB_MOE, OLDER_TYPES, REDUCED_PREFIX
from prunecli.errors import (
    CheckpointError,
    OutputError,
    PruneError,
    UnsupportedModelError,
    UsageError,
    damaged,
)
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.declared import MOST_LAYERS, class_names, counts_beyond, counts_experts
from prunecli.model.described import ConfiguredCheckpoint
from prunecli.model.probe import head_counts, shared_keys
from prunecli.model.skeleton import auto_classes_of, class_of_type, no_bars, transformers_takes
from prunecli.model.structure import KEY, WEIGHTS_KEY, Structure
from prunecli.modules.drawing import random_model
from prunecli.modules.fitting import free_for_each
from prunecli.modules.pooling import modules_of
from prunecli.processes import ProcessGroup
from prunecli.progress import Say, unsaid
from prunecli.tensors.json_files import GENERATION, lenient, read_object
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.side_files import MODULES_FILE
from prunecli.tensors.transaction import acquire, digest, write_json
from prunecli.text.choice import TrainingTask, task_of_class, training_task_of
from prunecli.text.tokens import Tokenizer, load_tokenizer

FORMAT = "prunecli.finetune-state/1"
RUN = "run.json"
WEIGHTS, TRAINER_STATE = "model.safetensors", "trainer_state.json"


def state_directory(output: Path) -> Path:
    """Directory of the state of the run that makes `output`: OUTPUT.training beside it."""
    return output.absolute().with_name(f"{output.name}.training")


@contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """Only one process at a time trains what becomes `output`; a process that ended, however it did, holds nothing.

    Raises:
        OutputError: another one does.
    """
    path = output.absolute().with_name(f".{output.name}.training.pid")
    try:
        held = acquire(path)
    except BlockingIOError:
        raise OutputError(
            f"{output}: another run trains it now (process {path.read_text() or 'unknown'})",
            "Wait until it has ended, or choose another `output`.",
        ) from None
    try:
        if held is not None:
            os.truncate(held, 0)
            os.write(held, str(os.getpid()).encode())
        yield
    finally:
        if held is not None:
            path.unlink(missing_ok=True)
            os.close(held)


HASHED = {
    "source": "the checkpoint",
    "bytes": "the checkpoint",
    "config": "config.json",
    "vocabulary": "the tokenizer",
    "train": "the training text",
    "valid": "the validation text",
    "teacher": "the teacher",
}
"""Keys of a run's identity that stand for files -> what these are."""


def prepare_state(state: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
    """Make the directory, or check that what it holds is of this very run.

    Args:
        identity: everything that the weights depend on; JSON values, for keys of `HASHED` the files' names -> hashes.
            Files may be moved.
        resume: go on from what is there; else it is removed.

    Raises:
        UsageError: it is of another run; with the first difference.
        OutputError: it holds something else.
    """
    run = state / RUN
    if not resume and run.is_file():
        shutil.rmtree(state)
    if run.is_file():
        kept = lenient(read_object)(run) or {}
        # 0.2.0 has names and hashes of files in the second.
        held, inputs = kept.get("run"), kept.get("inputs", {})
        if kept.get("format") != FORMAT or not isinstance(held, dict) or not isinstance(inputs, dict):
            raise UsageError(f"{run}: damaged", "Start over with `resume=never`.")
        before = held | inputs
        for key, now in json.loads(json.dumps(identity)).items():
            was = before.get(key)
            what = f"{key} was {was}, now it is {now}"
            if key in HASHED:
                was = was if isinstance(was, dict) else {}
                changed = [name for name, digest in now.items() if was.get(name, digest) != digest]
                what = f"{HASHED[key]} was {', '.join(was)}, now it is {', '.join(now) or 'none'}"
                if changed or not was:
                    what = f"{HASHED[key]} changed" + (f" ({', '.join(changed)})" if changed else "")
                was, now = ([files[name] for name in sorted(files)] for files in (was, now))
            if was == now:
                continue
            raise UsageError(
                f"{state}: the state of another run: {what}",
                "Repeat the first command to resume it; or start over with `resume=never`; or choose another `output`.",
            )
        return
    if state.exists() and (not state.is_dir() or any(state.iterdir())):
        raise OutputError(f"{state}: exists, but holds no run of prunecli", "Choose another `output`.")
    state.mkdir(exist_ok=True)
    write_json(run, {"format": FORMAT, "run": dict(identity)})


def last_checkpoint(state: Path) -> Path | None:
    """The latest checkpoint that was written to its end."""
    read = lenient(TrainerState.load_from_json)
    found = {
        int(number): path.parent
        for path in state.glob(f"checkpoint-*/{TRAINER_STATE}")
        # Of one process's files it is the last; the others' random numbers are checked by the Trainer.
        if (number := path.parent.name.rpartition("-")[2]).isdecimal() and read(str(path)) is not None
    }
    return found[max(found)] if found else None


def sound_state(checkpoint: Path) -> Any:
    """Return the Trainer's state of a checkpoint that training can go on from: step, best metric, log, callbacks.

    Raises:
        CheckpointError: one of its files is damaged.
    """
    with damaged(f"{checkpoint}: damaged", "Start over with `resume=never`."):
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        kinds = {"best_model_checkpoint": str, "best_global_step": int, "best_metric": int | float}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(state, name), kind | None):
                raise TypeError(f"{name} {value!r}")
        for counters in state.stateful_callbacks.values():
            dict(counters.get("attributes", {}).items())
        for path in (*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")):
            if not path.name.startswith("rng_state"):  # which holds numpy's, beside tensors
                torch.load(path, map_location="cpu", weights_only=True)
        load_file(checkpoint / WEIGHTS)
        return state


@torch.no_grad()
def fill(model: Any, kept: Mapping[str, Tensor]) -> None:
    """Copy weights into the model's parameters of the same names."""
    for name, own in kept.items():
        model.get_parameter(name).copy_(own)


WORKSPACE, FIXED = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""What has cuBLAS add in one order; it looks at it at its first product. 8 buffers of 4 MiB on each GPU."""

NONE_THERE = "does not have a deterministic implementation"
"""What torch says where it lacks one."""


@contextmanager
def fixed_order(device: torch.device, *, warn_only: bool) -> Iterator[None]:
    """Within the block a GPU computes in one order; on a CPU it always does.

    Args:
        warn_only: let pass what torch cannot compute so. torch's warnings of it are not shown.
    """
    if device.type != "cuda":
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False  # whatever is made is written before it is read
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*deterministic")
            yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def repeatable(
    device: torch.device, probe: Callable[[], None] | None, process_group: ProcessGroup, say: Say
) -> Iterator[None]:
    """`fixed_order` as far as torch has kernels for what a model computes.

    Many kernels of a GPU add in an order that is another one each time; torch has others, somewhat slower, for most of
    them. They are asked for, and where a model needs one that torch lacks, that is found by one batch, and said.

    Args:
        probe: a batch forwards and back, which leaves nothing behind but random numbers drawn; training seeds anew.
            None: it cannot be asked, and what torch lacks is let pass.
        say: hears of what torch cannot.
    """
    lacking = None
    # Strict where it can be: where torch only warns, attention takes kernels that add in any order.
    with fixed_order(device, warn_only=probe is None):
        try:
            if probe is not None and device.type == "cuda":
                probe()
        except RuntimeError as error:
            operation, found, _ = str(error).partition(NONE_THERE)
            if not found:
                raise
            lacking = operation.strip()
        if lacking := next(filter(None, process_group.all_gather(lacking)), None):
            say(
                f"{lacking} adds in no fixed order on a GPU: a run that is interrupted, or repeated, may end with "
                "other last digits."
            )
            torch.use_deterministic_algorithms(True, warn_only=True)
        yield


SPECIAL_IDS = ("pad_token_id", "eos_token_id", "bos_token_id")
"""Which config and tokenizer must agree on, as far as both have them."""

TRAINED = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM")
"""What opens the models that are trained from random weights."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.spm")
"""One of them at least is in a directory with a tokenizer."""


@dataclass(frozen=True)
class Start:
    """The model that training begins with.

    Attributes:
        checkpoint: its directory; None: random weights.
        config: of random weights: a config.json of a known family, or a directory with one.
        tokenizer: directory of the tokenizer of random weights; None: that beside `config`.
        seed: of random weights.
    """

    checkpoint: Path | None
    config: Path | None = None
    tokenizer: Path | None = None
    seed: int = 0

    @property
    def path(self) -> Path:
        """The file or directory that was named."""
        path = self.checkpoint or self.config
        assert path is not None
        return path

    @cached_property
    def identity(self) -> dict[str, dict[str, str]]:
        """Names of what the weights depend on -> the file or directory that holds it -> its hash.

        Raises:
            PruneError: what cannot be trained.
        """
        start, config = str(self.path), str(_file(self.path))
        if self.config is not None:
            values, _, words = _read(self.config, self.tokenizer)
            vocabulary = {str(self.tokenizer or start): digest(words.get_vocab())}
            return {"source": {}, "config": {config: digest(values)}, "vocabulary": vocabulary}
        with open_model(self.path) as checkpoint:
            checkpoint.require_trainable()
            checkpoint.refuse_constants()
            return {
                "source": {start: checkpoint.fingerprint},
                "bytes": {start: str(checkpoint.total_bytes)},
                "config": {config: digest(checkpoint.config)},
            }

    def open(self, state: Path) -> Checkpoint:
        """The checkpoint that training begins with.

        Random weights, as the family's stock class draws them, lie in the directory `state` with their tokenizer. A
        config.json of a reduced model gives one of that structure, made as large as that from the start.

        Raises:
            PruneError: a config or tokenizer that cannot be used, or that do not fit together.
        """
        directory = state / "initial"
        if self.config is None or directory.is_dir():
            return open_model(self.path if self.config is None else directory)
        file = _file(self.config)
        values, model_class, words = _read(self.config, self.tokenizer)
        if WEIGHTS_KEY not in values:  # config.json says all of a reduced model that its stock class runs
            values.pop(KEY, None)
        elif counts_experts(values) and values["model_type"] != NLLB_MOE.model_type:
            raise UnsupportedModelError(
                f"{file}: a mixture whose layers differ in their number of experts is not trained from random weights",
                "Give a config of one number for all.",
            )
        with transformers_takes(file):
            config = CONFIG_MAPPING[values["model_type"]].from_dict({**values, "dtype": None})
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
        needed, free = 4 * size, free_for_each(torch.device("cpu"))
        if needed > free:
            raise PruneError(
                f"{file}: its model of {size:,} parameters takes {bytes_text(needed)}; {bytes_text(free)} are free",
                "Make its sizes smaller.",
            )
        if KEY in values:
            # Nothing is left of the models that it was made of, nor does what was measured on them hold for it.
            reduced = Structure.from_json(values[KEY], str(file))
            steps = tuple({key: step[key] for key in step if key != "source"} for step in reduced.history)
            values = {**values, KEY: replace(reduced, history=steps).to_json()}
            model = random_model(ConfiguredCheckpoint(file, values), self.seed)
        else:
            torch.manual_seed(self.seed)
            with transformers_takes(file):
                model = model_class(config).float()
        directory.mkdir(parents=True)
        with no_bars():
            model.save_pretrained(directory)
        words.save_pretrained(directory)
        generation = file.parent / GENERATION
        if KEY in values and generation.is_file():  # that of the model that was reduced
            shutil.copyfile(generation, directory / GENERATION)
        opened = open_model(directory)
        opened.check()
        return opened

    def task(self, say: Say = unsaid) -> TrainingTask:
        """The model's task; without a head, the vectors of texts if `modules.json` says how they are pooled.

        Args:
            say: hears what is chosen for a model without a head.
        """
        if self.config is None:
            with open_model(self.path) as checkpoint:
                task = training_task_of(checkpoint)
                if task != "feature-extraction":
                    return task
                if modules_of(checkpoint.path) is not None:
                    say(f"{MODULES_FILE} says how texts are pooled: `task=embedding`, their vectors.")
                    return "embedding"
                say(
                    "The model has no head that is trained: `task=feature-extraction`, all hidden states; "
                    "`task=embedding` is for vectors."
                )
                return task
        values, model_class = read_config(self.config)
        is_pair = CONFIG_MAPPING[values["model_type"]].from_dict(values).is_encoder_decoder
        return task_of_class(model_class.__name__, is_pair=is_pair)


def _file(config: Path) -> Path:
    return config / "config.json" if config.is_dir() else config


def read_config(config: Path) -> tuple[dict[str, Any], Any]:
    """The values of a model's config, stock or reduced, and the class of transformers that it describes.

    Raises:
        PruneError: no such file, not JSON, or of a type that transformers has no class of text for.
    """
    file = _file(config)
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file", "Give a config.json, or a directory that holds one.")
    values = read_object(file)
    stated = str(values.get("model_type")).removeprefix(REDUCED_PREFIX)
    model_type = values["model_type"] = OLDER_TYPES.get(stated, stated)
    known = [name for auto, name in auto_classes_of(model_type) if auto in TRAINED]
    model_class = class_of_type((*class_names(values), *known), model_type) if known else None
    if model_class is None:
        raise UnsupportedModelError(
            f'{file}: the model family "{model_type}" is not supported',
            f"Set model_type to one whose models transformers opens with {', '.join(TRAINED)}.",
        )
    values.setdefault("architectures", [model_class.__name__])
    remedy, heads = "Correct the value.", head_counts(values)
    for key, count in counts_beyond(values, MOST_LAYERS).items():
        raise CheckpointError(f'{file}: "{key}" is {count}; no model has so many', remedy)
    for query, count in heads.items():
        for key in shared_keys(heads, query):
            if not heads[key] or count % heads[key]:
                raise CheckpointError(
                    f'{file}: "{query}" is {count}, no multiple of "{key}", {heads[key]}', remedy
                )
    return values, model_class


def _read(config: Path, named: Path | None) -> tuple[dict[str, Any], Any, Tokenizer]:
    """The results of `read_config`, with values of the tokenizer, and the tokenizer; a contradiction is refused."""
    file, (values, model_class) = _file(config), read_config(config)
    if named is None and not any(any(file.parent.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise CheckpointError(f"there is no tokenizer beside {file}", "Name one with `tokenizer=DIR`.")
    tokenizer = load_tokenizer(named or file.parent)
    size = values.setdefault("vocab_size", len(tokenizer))
    if not isinstance(size, int) or size < len(tokenizer):
        raise UsageError(
            f"{file}: vocab_size is {size}, the tokenizer has {len(tokenizer):,} tokens",
            f"Set vocab_size to {len(tokenizer)} or more, or leave it out.",
        )
    for key in SPECIAL_IDS:
        own = getattr(tokenizer, key, None)
        if own is not None and values.setdefault(key, own) != own:
            raise UsageError(
                f"{file}: {key} is {values[key]}, the tokenizer's is {own}",
                f"Set {key} to {own}, or leave it out.",
            )
    return values, model_class, tokenizer
