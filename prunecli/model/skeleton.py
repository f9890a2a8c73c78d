"""The class of transformers that opens a model, built from config.json without weights: names and shapes of tensors.

The names are those of the model's files: transformers' own rules for saving turn the module's names into them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from inspect import signature
from itertools import chain
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

from prunecli.architectures.records import ModelClass
from prunecli.errors import CheckpointError, UnsupportedModelError, damaged
from prunecli.model.axes import module_of
from prunecli.model.declared import SHARED_LAYERS, class_names, counts_beyond, with_keys
from prunecli.model.names import layer_of, with_new_ending
from prunecli.model.quantised import KEYS
from prunecli.model.structure import KEY, WEIGHTS_KEY
from prunecli.private import MAY_LACK, UNSAVED, model_from_config, with_special_floats
from prunecli.tensors.json_files import parsed

if TYPE_CHECKING:
    from torch import Tensor

    from prunecli.model.checkpoint import Checkpoint

Shape = tuple[int, ...]
_WORDS = ("wte.weight", "word_embeddings.weight", "embed_tokens.weight", "shared.weight")
"""Ends of the names of tables of tokens."""
_OTHERS = frozenset((*KEYS, KEY, WEIGHTS_KEY, "architectures", "auto_map", "output_router_logits"))
"""Keys of config.json that say nothing of what its class makes."""
Changes = Mapping[str, Any]
"""Key of config.json -> new value; a key may lie within another: `text_config.vocab_size`."""


@dataclass(frozen=True)
class Skeleton:
    """A stock class and a config.

    Attributes:
        model_class: of transformers.
        config_class: of the model's type.
        config: config.json.
    """

    model_class: Any
    config_class: Any
    config: Mapping[str, Any]

    @property
    def auto_class(self) -> str:
        """The `AutoModel…` that opens the class."""
        named = auto_classes_of(str(self.config.get("model_type")))
        return next((auto for auto, name in named if name == self.model_class.__name__), "AutoModel")

    @cached_property
    def opened_as(self) -> tuple[ModelClass, ...]:
        """The classes that transformers opens models of the type as, and the tensors that only some of them have."""
        import transformers

        stored: dict[tuple[str, str], set[str]] = {}
        tied: set[str] = set()
        start, is_pair = self.model_class.base_model_prefix, self.effective.get("is_encoder_decoder")
        for auto, name in auto_classes_of(str(self.config.get("model_type"))):
            with suppress(Exception), quiet():  # of any kind: what a class makes of a config of another one
                other = replace(self, model_class=_without_pooler(getattr(transformers, name)))
                # Others have the layers elsewhere, or are the decoder alone.
                if other.model_class.base_model_prefix == start and not (
                    is_pair and auto.endswith("CausalLM")
                ):
                    may_lack = getattr(other.model_class, MAY_LACK) or ()
                    stored[auto, name] = {
                        own.removeprefix(f"{start}.")
                        for own in other.stored
                        if not any(re.search(pattern, own) for pattern in may_lack)
                    }
                    tied |= {own.removeprefix(f"{start}.") for own in other.tied}
        common = tied.union(set.intersection(*stored.values()) if stored else ())
        # Parts of layers may be shared or gone.
        bases = (own for (auto, _), own in stored.items() if auto == "AutoModel")
        common.update(name for own in bases for name in own if layer_of(name))
        heads = {
            key: tuple(sorted(own - common, key=lambda name: ("pooler" not in name, name)))
            for key, own in stored.items()
        }
        ends = ("Classification", "Answering", "MultipleChoice")
        labelling = Counter(own[-1:] for (auto, _), own in heads.items() if auto.endswith(ends))
        return tuple(
            ModelClass(name, auto, own, labelled=auto.endswith(ends) and labelling[own[-1:]] > 1)
            for (auto, name), own in heads.items()
        )

    @property
    def is_masked(self) -> bool:
        """Whether every token of a text sees all others."""
        from transformers.models.auto import modeling_auto

        masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        # Types that are in several mappings, such as BERT and BART, are decoders where their config says so.
        is_other = self.effective.get("is_decoder") or self.effective.get("is_encoder_decoder")
        return self.config.get("model_type") in masked and not is_other

    def config_of(self, config: Mapping[str, Any]) -> Any:
        """A config of transformers with these values."""
        return self.config_class.from_dict(with_special_floats(self.config_class, config))

    @cached_property
    def effective(self) -> dict[str, Any]:
        """config.json with all that the config class fills in."""
        found: dict[str, Any] = self.config_of(self.config).to_dict()
        return found

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Name of each tensor, as a module has it -> its shape."""
        return {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}

    @cached_property
    def stored(self) -> dict[str, Shape]:
        """Name of each tensor, as the files have it -> its shape."""
        return {name: tuple(tensor.shape) for name, tensor in self._both_forms[1].items()}

    def stored_beside(self, names: Iterable[str]) -> dict[str, Shape]:
        """`stored`, of these tensors of the model and of those that files may join with them.

        All of them take transformers seconds where there are many layers and experts.
        """
        blocks = {module_of(module_of(name)) for name in names}
        state = self.model.state_dict().items()
        beside = {name: tensor for name, tensor in state if module_of(module_of(name)) in blocks}
        return {name: tuple(tensor.shape) for name, tensor in stored_form(self.model, beside).items()}

    @cached_property
    def _both_forms(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors by their names in the model, and in files; most are the same objects."""
        state = self.model.state_dict()
        return state, stored_form(self.model, state)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self._both_forms[1].items()}

    @cached_property
    def tied(self) -> set[str]:
        """Names, as the files have them, of the tensors that are tied to others."""
        pairs = self.model.all_tied_weights_keys.items()
        return {self.stored_name(name) for pair in pairs for name in pair}

    def stored_name(self, name: str) -> str:
        """The name in files of a tensor of the model."""
        tensor = self._both_forms[0][name]
        return self._names.get(id(tensor)) or next(iter(stored_form(self.model, {name: tensor})), name)

    @cached_property
    def model(self) -> Any:
        """The model on the meta device.

        Raises:
            Exception: of any kind: what transformers makes of a config that it cannot build.
        """
        import torch
        from transformers import initialization

        with torch.device("meta"), initialization.no_init_weights():
            return model_from_config(self.model_class, self.config_of(self.config))

    def changed(self, changes: Changes) -> Skeleton | None:
        """Return the class with other config values; None: transformers refuses the values."""
        other = Skeleton(self.model_class, self.config_class, with_keys(self.explicit.config, changes))
        with suppress(Exception), quiet():  # of any kind: classes check their configs in many ways
            other.shapes  # noqa: B018
            return other
        return None

    def reads(self, key: str, value: int) -> bool:
        """Whether shapes of tensors change with this value, or transformers refuses it; asked once for each key."""
        if key not in self._read:
            other = self.changed({key: value})
            self._read[key] = other is None or other.shapes != self.shapes
        return self._read[key]

    @cached_property
    def _read(self) -> dict[str, bool]:
        return {}

    def donor(self, changes: Changes) -> Any:
        """The model with other values, to be looked at; made once for all skeletons of this config.

        Raises:
            ValueError: transformers refuses them.
        """
        own = known_skeleton(self.model_class, self.config_class, self.config)
        key = repr(changes)
        if key not in own.donors:
            other = own.changed(changes)
            if other is None:
                raise ValueError("transformers refuses a smaller config")
            own.donors[key] = other.model
        return own.donors[key]

    @cached_property
    def donors(self) -> dict[str, Any]:
        """Changes, as text -> the model that `donor` made with them."""
        return {}

    @cached_property
    def explicit(self) -> Skeleton:
        """Skeleton whose config leaves nothing to defaults: no key follows from another."""
        if self.effective == self.config:
            return self
        other = Skeleton(self.model_class, self.config_class, self.effective)
        with suppress(Exception):
            if other.shapes == self.shapes:
                return other
        return self

    def settled(self, changes: Changes) -> dict[str, Any]:
        """config.json with these values, and with those that would follow from them as they were before."""
        # The class believes one name, if two of a value are stated.
        stated = ((own, of) for own, of in self.config_class.attribute_map.items() if own in self.config)
        changes = {**changes, **{own: changes[of] for own, of in stated if of in changes}}
        wanted = with_keys(self.effective, changes)
        changed = with_keys(self.config, changes)
        return _stating(changed, self.config_of(changed).to_dict(), wanted)


def known_skeleton(model_class: Any, config_class: Any, config: Mapping[str, Any]) -> Skeleton:
    """Skeleton of a class and a config.json, whose model is made once, without the keys that say nothing of it."""
    return _known(
        model_class, config_class, dumps({key: config[key] for key in config if key not in _OTHERS})
    )


@lru_cache(maxsize=16)  # a model and its result are opened several times, and some types have ten classes
def _known(model_class: Any, config_class: Any, config: str) -> Skeleton:
    return Skeleton(model_class, config_class, parsed(config))


def computed_parameters(model: Any) -> tuple[str, ...]:
    """Names of the parameters that a class computes, so that files need not hold them: sinusoidal positions."""
    positions = (name for name, module in model.named_modules() if "Sinusoidal" in type(module).__name__)
    return (*(getattr(model, UNSAVED) or ()), *(f"{name}.weight" for name in positions))


def stored_form(model: Any, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a model, or some of them, by their names in files; without those that its class never writes."""
    from transformers.core_model_loading import revert_weight_conversion

    own, computed = model.state_dict() if state is None else state, computed_parameters(model)
    found: dict[str, Tensor] = revert_weight_conversion(
        model, {name: tensor for name, tensor in own.items() if name not in computed}
    )
    # ESM's class writes the older names of norms; its published files, and checkpoints here, have those of today.
    return {with_new_ending(name): tensor for name, tensor in found.items()}


def _stating(config: dict[str, Any], found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """`config`, of which `found` is made, with what it takes to be `wanted`."""
    for key, value in wanted.items():
        if found.get(key) == value:
            continue
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            config[key] = _stating(dict(config.get(key) or {}), found[key], value)
        else:
            config[key] = value
    return config


def skeleton_of(checkpoint: Checkpoint) -> Skeleton:
    """The class that the tensors fit, or else that config.json names.

    Raises:
        UnsupportedModelError: transformers has none, or cannot build it.
        CheckpointError: config.json names no type.
    """
    require_depth(checkpoint)
    name = checkpoint.own_class or next(iter(class_names(checkpoint.config)), None)
    name = name or class_that_fits(checkpoint, checkpoint.tensors)[0]
    made = _skeleton(checkpoint, name, checkpoint.tensors)
    with transformers_takes(checkpoint.path / "config.json"):
        made.stored  # noqa: B018
    return made


def class_that_fits(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """The class that config.json names, or another one of the type, of whose tensors the fewest are missing.

    Tensors of layers that a class does not have count too.

    Args:
        names: of tensors; those of the base model may lack the first part, or have it although the class does not.

    Returns:
        Its name; and name -> name of the tensor as the class stores it.

    Raises:
        UnsupportedModelError: they fit none.
        CheckpointError: config.json names no type.
    """
    classes = (*class_names(checkpoint.config)[:1], *classes_of_type(checkpoint.model_type))
    found = {}
    for name in dict.fromkeys(classes):
        with suppress(Exception), quiet():  # of any kind: what a class makes of a config of another one
            made = _skeleton(checkpoint, name, names)
            stored, start = made.stored, f"{made.model_class.base_model_prefix}."
            roots = {own.partition(".")[0] for own in stored}
            renamed = {}
            for own in names:
                forms = own, start + own, own.removeprefix(start)
                known = (one for one in forms if one in stored)
                rooted = (one for one in forms if one.partition(".")[0] in roots)
                renamed[own] = next(chain(known, rooted), own)
            # A factorised embedding may be in the place of the table of tokens.
            table = [own for own in stored if own.endswith(_WORDS)]
            missing = stored.keys() - made.tied - {*renamed.values(), *table}
            strange = [own for own in renamed.values() if own not in stored and layer_of(own)]
            # Of a layer that shares its parts, or lost them, there is a norm at least.
            absent = {layer_of(own) or own for own in missing}.difference(map(layer_of, renamed.values()))
            if 2 * len(missing) < len(stored) and len({*renamed.values()}) == len(renamed):
                found[name] = len(absent) + len(strange), renamed
                if not found[name][0]:
                    break
    if not classes:
        raise class_unknown(checkpoint, "")
    if not found:
        raise UnsupportedModelError(
            f"{checkpoint.path}/config.json: names no class, and the tensors fit none of {', '.join(classes)}",
            'Add "architectures"; if the tensors have names of an older transformers, save the model with it first.',
        )
    name = min(found, key=lambda name: found[name][0])
    return name, found[name][1]


def ties_of(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, str]:
    """Name of a tensor -> name of the one that its class ties it to, as files have them; empty if it says nothing.

    Args:
        names: of the tensors.
    """
    for name in (checkpoint.own_class, *class_names(checkpoint.config)[:1]):
        with suppress(Exception), quiet():  # of any kind: what a class makes of its config
            made = _skeleton(checkpoint, str(name), names)
            tied = made.model.all_tied_weights_keys.items()
            return {made.stored_name(alias): made.stored_name(own) for alias, own in tied}
    return {}


def _skeleton(checkpoint: Checkpoint, name: str, names: Iterable[str]) -> Skeleton:
    model_class = class_named(checkpoint, name, names)
    return known_skeleton(model_class, config_class(checkpoint, model_class), checkpoint.config)


def transformers_takes(config: Path | str) -> AbstractContextManager[None]:
    """Inside, an error of transformers about a value of a config.json is a `CheckpointError`.

    Args:
        config: the file.
    """
    return damaged(
        f"{config}: transformers cannot make the model", "Correct the value, or copy the file again."
    )


def class_named(checkpoint: Checkpoint, name: str, names: Iterable[str]) -> Any:
    """The class of transformers of this name, without a pooler if the files hold none and the class can do without.

    Args:
        names: of the tensors; none if there are no files yet.

    Raises:
        UnsupportedModelError: there is none, or it is of another family.
        CheckpointError: config.json names no type.
    """
    import transformers

    found, model_type = class_of_type((name,), checkpoint.model_type), checkpoint.model_type
    # `architectures` alone is not believed: a class of another family would fill what it lacks with random numbers.
    if found is None and name in classes_of_type(model_type):
        found = getattr(transformers, name, None)
    if found is None:
        raise class_unknown(checkpoint, name)
    has_pooler = not names or any(re.search(r"(^|\.)pooler\.", own) for own in names)
    return found if has_pooler else _without_pooler(found)


@cache
def _without_pooler(stock: Any) -> Any:
    """A class whose models have no pooler; the class itself if it has none, or always has one."""
    if "add_pooling_layer" not in signature(stock.__init__).parameters:
        return stock

    def make(self: Any, config: Any) -> None:
        stock.__init__(self, config, add_pooling_layer=False)

    return subclass(stock, __init__=make)


def subclass(stock: Any, *before: type, **members: Any) -> Any:
    """A subclass of a class of transformers with other members, under the same name.

    Args:
        before: classes whose members come before those of `stock`.
    """
    members = {"__module__": stock.__module__, "__doc__": stock.__doc__, **members}
    return type(stock.__name__, (*before, stock), members)


def class_of_type(names: Iterable[str], model_type: str) -> Any:
    """The first class of transformers of these names that is of the type; None: there is none."""
    import transformers

    for name in names:
        known = getattr(transformers, name, None)
        if getattr(getattr(known, "config_class", None), "model_type", None) == model_type:
            return known
    return None


def class_unknown(checkpoint: Checkpoint, name: str) -> CheckpointError:
    """The error that transformers has no class `name`, or that config.json names no type."""
    where = f'{checkpoint.path}/config.json: names no "model_type"'
    if of := checkpoint.config.get("_class_name"):
        return CheckpointError(f"{where}; it is of {of}, of diffusers", "Give a language model.")
    if checkpoint.config.get("model_type") is None:
        fitting = " or ".join(_types_that_fit(checkpoint)) or "no type of the installed transformers"
        return CheckpointError(where, f'Add "model_type"; the tensors fit {fitting}.')
    if name and (known := classes_of_type(str(checkpoint.model_type))):
        return UnsupportedModelError(
            f"{checkpoint.path}: no {name} can be made of it", f"It can be one of {', '.join(known)}."
        )
    return UnsupportedModelError(
        f'{checkpoint.path}: the model family "{checkpoint.model_type}" is unknown here (class {name or "not given"})',
        "It runs code of its own (auto_map), which prunecli never does."
        if "auto_map" in checkpoint.config
        else "Check model_type and architectures in its config.json.",
    )


def _types_that_fit(checkpoint: Checkpoint) -> list[str]:
    """Model types whose class, one that config.json names if it names any, has the names and shapes of the tensors."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    sizes = {key for key, value in checkpoint.config.items() if type(value) is int and "token" not in key}
    own = sizes.difference(dir(transformers.PreTrainedConfig()))
    folder, found = Path(transformers.__file__).parent / "models", []
    for model_type in transformers.CONFIG_MAPPING if own else ():
        names = classes_of_type(model_type)
        names = [name for name in class_names(checkpoint.config) or names[:1] if name in names]
        files = (folder / model_type_to_module_name(model_type)).glob("configuration_*.py")
        # Importing the configs of all types takes 10 seconds; a look into their files does not.
        text = "".join(file.read_text("utf-8") for file in files)
        if not names or not own <= {*re.findall(r"""(?m)(?:^    |["'])(\w+)""", text)}:
            continue
        with suppress(Exception), quiet():  # of any kind: what a class makes of the config of another type
            known = transformers.CONFIG_MAPPING[model_type]
            if sizes <= set(dir(known())):
                config = {**checkpoint.config, "model_type": model_type}
                made = Skeleton(getattr(transformers, names[0]), known, config)
                if shapes.items() <= made.stored.items() and made.stored.keys() - made.tied <= shapes.keys():
                    found.append(model_type)
    return found


def config_class(checkpoint: Checkpoint, model_class: Any) -> Any:
    """The config class of `model_class`; of a type that only borrows the class, that of the type."""
    from transformers import CONFIG_MAPPING

    own = model_class.config_class
    return own if own.model_type == checkpoint.model_type else CONFIG_MAPPING[checkpoint.model_type]


def classes_of_type(model_type: str) -> list[str]:
    """The classes that transformers opens models of a type with, those with a head for text first, the base last."""
    return [name for _, name in auto_classes_of(model_type)]


def auto_classes_of(model_type: str) -> list[tuple[str, str]]:
    """Return the classes for a model type, each after the `AutoModel…` that opens it."""
    from transformers.models.auto import modeling_auto

    mappings = {
        "Seq2SeqLM": "FOR_SEQ_TO_SEQ_CAUSAL_LM_",
        "MaskedLM": "FOR_MASKED_LM_",
        "CausalLM": "FOR_CAUSAL_LM_",
        "SequenceClassification": "FOR_SEQUENCE_CLASSIFICATION_",
        "TokenClassification": "FOR_TOKEN_CLASSIFICATION_",
        "QuestionAnswering": "FOR_QUESTION_ANSWERING_",
        "MultipleChoice": "FOR_MULTIPLE_CHOICE_",
        "NextSentencePrediction": "FOR_NEXT_SENTENCE_PREDICTION_",
        "PreTraining": "FOR_PRETRAINING_",
        "ImageTextToText": "FOR_IMAGE_TEXT_TO_TEXT_",
        "SpeechSeq2Seq": "FOR_SPEECH_SEQ_2_SEQ_",
        "": "",
    }
    found = []
    for auto, mapping in mappings.items():
        names = getattr(modeling_auto, f"MODEL_{mapping}MAPPING_NAMES").get(model_type, ())
        auto_class = f"AutoModelFor{auto}" if auto else "AutoModel"
        found += [(auto_class, name) for name in ((names,) if isinstance(names, str) else names)]
    return found


def require_depth(checkpoint: Checkpoint) -> None:
    """Refuse numbers of layers, or of experts, that transformers would make one after another for hours."""
    most = max(SHARED_LAYERS, len(checkpoint.tensors))
    for key, count in counts_beyond(checkpoint.config, most).items():
        raise CheckpointError(
            f"{checkpoint.path}/config.json: {key} is {count:,}, and the checkpoint has "
            f"{len(checkpoint.tensors):,} tensors",
            "Correct the value, or copy the file again.",
        )


@contextmanager
def no_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers prints neither reports nor progress, and no library warns."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with no_bars(), catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(before)
