"""What training begins with: a checkpoint, or random weights of a config that are kept in the run's state."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic.dataclasses import dataclass

from prunecli.architectures import EXPERTS_ONLY, FAMILIES, OLDER_TYPES, REDUCED_PREFIX, Architecture
from prunecli.architectures.mixtures import IMAGES, LANGUAGE_MODEL, experts_alone
from prunecli.errors import CheckpointError, PruneError, UnsupportedModelError, UsageError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.declared import MOST_LAYERS, class_names, counts_experts, depths_beyond
from prunecli.model.described import ConfiguredCheckpoint
from prunecli.model.skeleton import class_of_type, no_bars, transformers_takes
from prunecli.model.structure import KEY, WEIGHTS_KEY, Structure
from prunecli.modules.drawing import random_model
from prunecli.modules.fitting import free_for_each
from prunecli.modules.pooling import modules_of
from prunecli.progress import Say, unsaid
from prunecli.tensors.json_files import GENERATION, read_object
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.side_files import MODULES_FILE
from prunecli.tensors.unfinished import digest
from prunecli.text.choice import TrainingTask, task_of_class, training_task_of
from prunecli.text.tokens import Tokenizer, load_tokenizer

SPECIAL_IDS = ("pad_token_id", "eos_token_id", "bos_token_id")
"""Which config and tokenizer must agree on, as far as both have them."""

KNOWN = {
    **{name: family for name, family in EXPERTS_ONLY.items() if family.auto_class != IMAGES},
    **FAMILIES,
}
"""Model type -> the family's record, of those that are trained from random weights; see `read_config`."""

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
        start = str(self.path)
        config = str(self.path / "config.json") if self.path.is_dir() else start
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
        values, family, words = _read(self.config, self.tokenizer)
        if family.must_be_stock:  # of a reduced model config.json says all, since its stock class runs it
            if WEIGHTS_KEY in values:
                raise UnsupportedModelError(
                    f"{file}: a mixture whose layers differ in their number of experts is not trained from random "
                    "weights",
                    "Give a config of one number for all.",
                )
            values.pop(KEY, None)
        if KEY in values:
            # Nothing is left of the models that it was made of, nor does what was measured on them hold for it.
            reduced = Structure.from_json(values[KEY], str(file))
            steps = tuple({key: step[key] for key in step if key != "source"} for step in reduced.history)
            values = {**values, KEY: replace(reduced, history=steps).to_json()}
            described = ConfiguredCheckpoint(file, values)
            require_room_to_draw(file, described.total_parameters)
            model = random_model(described, self.seed)
        else:
            from transformers import CONFIG_MAPPING

            model_class = class_of_type((*class_names(values), family.model_class), family.model_type)
            if model_class is None:
                raise UnsupportedModelError(
                    f"{file}: transformers has no class of its own for a model of type {family.model_type}",
                    "Choose a config of a family that it has one for.",
                )
            with transformers_takes(file):
                config = CONFIG_MAPPING[family.model_type].from_dict({**values, "dtype": None})
                with torch.device("meta"):
                    size = sum(parameter.numel() for parameter in model_class(config).parameters())
                require_room_to_draw(file, size)
                torch.manual_seed(self.seed)
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
                    "A model without a head: `task=feature-extraction`, all hidden states; "
                    "`task=embedding` is for vectors."
                )
                return task
        values, family = read_config(self.config)
        name = next(iter(class_names(values)), family.model_class)
        is_pair = len(family.stacks) > 1 or values.get("is_encoder_decoder") is True
        return task_of_class(name, is_pair=is_pair)


def _file(config: Path) -> Path:
    return config / "config.json" if config.is_dir() else config


def read_config(config: Path) -> tuple[dict[str, Any], Architecture]:
    """The values of a model's config, stock or reduced, and the record of its family, or of its mixture's class.

    Raises:
        PruneError: no such file, not JSON, or of a family that is not declared.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = _file(config)
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file", "Give a config.json, or a directory that holds one.")
    values = read_object(file)
    stated = str(values.get("model_type")).removeprefix(REDUCED_PREFIX)
    model_type = values["model_type"] = OLDER_TYPES.get(stated, stated)
    family = KNOWN.get(model_type)
    if family is None and counts_experts(values) and "text_config" not in values:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        family = experts_alone(model_type, name, LANGUAGE_MODEL) if isinstance(name, str) else None
    if family is None:
        raise UnsupportedModelError(
            f'{file}: the model family "{model_type}" is not supported',
            f"Set model_type to one of {', '.join(KNOWN)}.",
        )
    for key, depth in depths_beyond(values, MOST_LAYERS).items():
        raise CheckpointError(
            f'{file}: "{key}" is {depth}; no model has so many layers', "Correct the value."
        )
    return values, family


def _read(config: Path, named: Path | None) -> tuple[dict[str, Any], Architecture, Tokenizer]:
    """The results of `read_config`, with values of the tokenizer, and the tokenizer; a contradiction is refused."""
    file, (values, family) = _file(config), read_config(config)
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
    return values, family, tokenizer


def require_room_to_draw(config: Path, parameters: int) -> None:
    """Refuse random weights that the machine has no memory for, in float32.

    Raises:
        PruneError: it has not.
    """
    needed, free = 4 * parameters, free_for_each(torch.device("cpu"))
    if needed > free:
        raise PruneError(
            f"{config}: its model of {parameters:,} parameters takes {bytes_text(needed)}; {bytes_text(free)} are free",
            "Make its sizes smaller.",
        )
