"""`open_model`: config.json, the structure and the tensors of a directory, under the family's stock names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import combinations, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prunecli.architectures import EXPERTS_ONLY, NLLB_MOE, Architecture
from prunecli.errors import CheckpointError, PruneError, UnsupportedModelError, located
from prunecli.model.conversion import checkpoint_directory
from prunecli.model.declared import (
    REMEDY,
    SHARED_LAYERS,
    Sizes,
    all_items,
    class_names,
    counts_beyond,
    counts_experts,
    plain_config,
)
from prunecli.model.embedding import resolve_tables, resolve_ties
from prunecli.model.fingerprint import fingerprint, router_fingerprint, samples_of
from prunecli.model.layout import ModelLayout, resolve
from prunecli.model.mixtures import find_mixtures
from prunecli.model.names import same_values, stored_names, with_new_ending
from prunecli.model.quantised import QuantisedWeight, find_quantised, method_of, value_dtype, values_of
from prunecli.model.skeleton import class_that_fits, ties_of
from prunecli.model.sparse_layer import SparseLayer
from prunecli.model.structure import KEY, Structure
from prunecli.progress import Say, unsaid
from prunecli.tensors.directory import find_weights, read_config
from prunecli.tensors.reader import Stored, TensorInfo, TensorReader, WeightFile
from prunecli.tensors.side_files import SideFiles, side_files

if TYPE_CHECKING:
    from prunecli.model.probed import Probed


_BARE = re.compile(r"(h|layers?|blocks?|encoder|decoder|embeddings|wte|(word|tok)_embeddings|embed_tokens)\.")
"""Beginning of the names of a base model's tensors."""
_HEADLESS = re.compile(r"(?<!LMHead)(?<!MT)Model$")
"""End of the name of a class without a head."""
_ROOTS = {
    "bert": "bert.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
    "distilbert": "distilbert.",
    "gpt2": "transformer.",
    **dict.fromkeys(("bart", "mbart", "m2m_100", "marian", "pegasus", "opt", "llama", "mistral"), "model."),
    **dict.fromkeys(("qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "phi3"), "model."),
}
"""Type -> beginning that the names of a base model's tensors have in its fingerprint, as in that of prunecli 0.2."""


class Checkpoint(TensorReader):
    """An open checkpoint directory; a context manager. Nothing is read but what is asked for.

    Attributes:
        config: config.json.
        structure: what was removed from the original model.
        tensors: what the checkpoint holds, in file order, under the names of the family's stock layout; tied
            aliases and buffers are left out.
        own_class: name of the class of transformers that stores tensors so, where config.json may name another one.
    """

    def __init__(self, path: Path, config: dict[str, Any], files: tuple[WeightFile, ...]) -> None:
        self.config = plain_config(config)
        where = str(path / "config.json")
        self.structure = Structure() if config.get(KEY) is None else Structure.from_json(config[KEY], where)
        self._is_checked = False
        self.own_class: str | None = None
        super().__init__(path, files)
        if self._declared is None:
            self.structure = self.structure.renamed(self.without_root)

    @property
    def traffic(self) -> list[int]:
        """Bytes of each answer of the hub, for a streamed checkpoint."""
        return []

    @property
    def model_type(self) -> str:
        """Model type in config.json."""
        return str(self.config.get("model_type"))

    @property
    def family(self) -> Architecture | None:
        """The declared family, or a record of its experts; None if nothing is declared and no experts are found."""
        return self._declared or self._experts

    @cached_property
    def _experts(self) -> Architecture | None:
        """Record of the experts that the class has; None: no experts, or none that the small copy confirms."""
        with located(self.path):
            if not counts_experts(self.config):
                return None
        with suppress(PruneError):
            return self._find_experts()
        return None

    def _find_experts(self) -> Architecture | None:
        from prunecli.model.found import found_experts

        return found_experts(self)

    @cached_property
    def probed(self) -> Probed:
        """Its class, asked what it is made of.

        Raises:
            UnsupportedModelError: it says nothing.
            CheckpointError: config.json names no type.
        """
        from prunecli.model.probed import probed

        return probed(self)

    @cached_property
    def runs_by_layer(self) -> bool:
        """Whether prunecli can read and run the layers, and experts, of its stock class one after another.

        Raises:
            UnsupportedModelError, CheckpointError: as `probed`.
        """
        from prunecli.private import can_replace_experts  # imports torch

        trial, has_experts = self.probed.trial, bool(self.mixtures)
        # Tensors that the class turns into others are read only where they are those of experts.
        is_read = all(has_experts and "expert" in name for name in trial.turned)
        is_run = has_experts == can_replace_experts(trial.model)
        return is_read and is_run and trial.runs_by_layer(trial.stacks)

    @cached_property
    def _declared(self) -> Architecture | None:
        """NLLB-MoE, or the experts of one of the mixtures that are declared."""
        return EXPERTS_ONLY.get(self.model_type) if self.runs_stock else NLLB_MOE

    @property
    def runs_stock(self) -> bool:
        """Whether it runs in the class that transformers opens it with; else prunecli builds its model."""
        return self.model_type != NLLB_MOE.model_type

    @cached_property
    def side_files(self) -> SideFiles:
        """Every other file that belongs to the checkpoint, and what lies beside it and does not."""
        return side_files(self.path, self.files)

    @cached_property
    def quantised(self) -> Mapping[str, QuantisedWeight]:
        """By name, the weights that are stored quantised.

        Raises:
            CheckpointError: the scales of one are not of its shape, or absent.
        """
        with located(self.path):
            return find_quantised(self.tensors, self.config)

    @cached_property
    def unquantised(self) -> Mapping[str, TensorInfo]:
        """`tensors` as they would be unquantised, of the type that config.json names: nothing else where none is.

        Raises:
            CheckpointError: as `quantised`.
        """
        if not self.quantised:
            return self.tensors
        shapes = {} if self.family is None else self.resolved.shapes
        return values_of(self.tensors, self.quantised, value_dtype(self.config), shapes)

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of one tensor.

        Raises:
            UnsupportedModelError: it is quantised, so that what is stored goes by other names.
            CheckpointError: there is none of this name.
        """
        if name not in self.tensors and name in self.quantised:
            raise self.quantised_refusal(name)
        return super().info(name)

    def quantised_refusal(self, name: str) -> UnsupportedModelError:
        """The error of what would have to compute with a quantised weight."""
        weight = self.quantised[name]
        return UnsupportedModelError(
            f"{self.path}: {name} is quantised ({method_of(self.config) or weight.scheme}): prunecli moves such "
            f"weights as they are, and computes nothing with {', '.join(sorted(weight.parts.values()))}",
            "prune-experts, prune-layers and trim-vocabulary work; or give the model before it was quantised.",
        )

    @cached_property
    def fingerprint(self) -> str:
        """ "sha256:<hex>" over every tensor's name, shape and 16 values, rounded to float16: which model it is.

        A float32 checkpoint and its float16 copy have the same fingerprint, as have its .bin and .safetensors
        forms; a bfloat16 copy of float32 weights has lost bits that float16 keeps, and is another model.
        """
        samples, root = self._samples(), _ROOTS.get(self.model_type, "")
        if any(name.startswith(root) for name in samples):
            root = ""
        tensors = {root + name: info for name, info in self.tensors.items()}
        return fingerprint(tensors, {root + name: sample for name, sample in samples.items()})

    def require_routed(self) -> list[SparseLayer]:
        """Mixtures that a forward pass runs: without layers that predict further tokens.

        Raises:
            UnsupportedModelError, CheckpointError: as `require_mixtures`.
        """
        return [layer for layer in self.require_mixtures() if not layer.is_predicting]

    @cached_property
    def router_fingerprint(self) -> str:
        """ "sha256:<hex>" over the routers of its mixtures: equal for a model and what it was quantised to.

        Layers that predict further tokens are left out, as some copies do not have them.

        Raises:
            UnsupportedModelError, CheckpointError: as `require_mixtures`.
        """
        return router_fingerprint(
            self, (name for layer in self.require_routed() for name in layer.router_tensors)
        )

    @property
    def layout(self) -> ModelLayout:
        """Layers, tensors and ties by config.json and structure.

        Raises:
            UnsupportedModelError: its class says nothing, or no more than its experts.
            CheckpointError: config.json lacks a size, or says what cannot be.
        """
        self.require_architecture()
        return self.resolved

    @cached_property
    def resolved(self) -> ModelLayout:
        """Layout, without layers if the experts alone are declared.

        Raises:
            UnsupportedModelError, CheckpointError: as `layout`.
        """
        family = self.__dict__.get("_found_family", self.family) or self.require_architecture()
        with located(self.path):
            layout = resolve(family, self.config, self.structure)
            len(layout.tensors)  # here, where errors get the path
            return layout

    @cached_property
    def mixtures(self) -> tuple[SparseLayer, ...]:
        """The mixtures of experts that it holds; see `find_mixtures`."""
        sizes = self.resolved.sizes
        with located(self.path):
            return find_mixtures(self.path, self.tensors, sizes, self.structure)

    def require_mixtures(self) -> tuple[SparseLayer, ...]:
        """The mixtures of experts, at least one.

        Raises:
            UnsupportedModelError: its class says nothing, or the model has no experts.
            CheckpointError: as `find_mixtures`.
        """
        if not self.mixtures:
            if self.family is None and counts_experts(self.config):
                self._find_experts()  # says why there are none
            raise UnsupportedModelError(
                f"{self.path}: the model has no experts", "Give a mixture-of-experts checkpoint."
            )
        return self.mixtures

    @property
    def has_constants(self) -> bool:
        """Whether constants stand for some of its experts."""
        return self.family is not None and any(layer.constants for layer in self.mixtures)

    def refuse_constants(self) -> None:
        """For what measures, changes or trains experts.

        Raises:
            UnsupportedModelError: constants stand for some of them.
        """
        if self.has_constants:
            raise UnsupportedModelError(
                f"{self.path}: constants stand for experts, so that it can be run, and changed no more",
                "Continue with the model that it was made of, and use prune-experts --constant-experts last.",
            )

    def check(self) -> None:
        """Compare what it holds with what its config and structure ask for, once.

        Raises:
            UnsupportedModelError: its class says nothing.
            CheckpointError: missing, unexpected or misshapen tensors, or a config.json that cannot be.
        """
        if self._is_checked:
            return
        layout = self.resolved
        if self.family is not None and self.runs_stock:  # what is wrong with mixtures is said in their words
            self.require_mixtures()
        if faults := layout.faults({name: info.shape for name, info in self.unquantised.items()}):
            raise CheckpointError(
                f"{self.path}: tensors do not fit config.json: {faults}",
                f"{REMEDY} Or the tensors are of an older class than {layout.family.model_class}.",
            )
        self._is_checked = True

    def require_architecture(self) -> Architecture:
        """The family's record: declared, or found by asking its class.

        Raises:
            UnsupportedModelError: it is not declared, and its class says nothing.
        """
        return self._found_family if self.runs_stock else NLLB_MOE

    @cached_property
    def _found_family(self) -> Architecture:
        from prunecli.model.found import found_family

        self.refuse_constants()
        found = found_family(self)
        self.__dict__.pop("resolved", None)  # which knows the experts alone
        return found

    def require_trainable(self) -> None:
        """Refuse a model that cannot be trained here.

        Raises:
            UnsupportedModelError: not even its experts are declared, or its weights are quantised.
        """
        if self.family is None:
            self.require_architecture()
        if method := method_of(self.config):
            raise UnsupportedModelError(
                f"{self.path}: its weights are quantised ({method}), which are not trained",
                "Train the same model in floating point, and quantise the result.",
            )

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.model_type}, {len(self.tensors)} tensors)"

    def _named(self) -> dict[str, tuple[int, Stored]]:
        """Under their stock names, without buffers and tied aliases: (file number, where its bytes lie)."""
        tensors = self._by_stored_name
        family = self._declared
        if family is None:
            return self._named_by_class()
        with located(self.path):
            sizes = Sizes(family, self.config)
            is_stock = self.structure.embedding.is_stock
            tied = resolve_ties(sizes, None if is_stock else resolve_tables(sizes, self.structure))
        named = stored_names(family, tied, list(tensors), self._equal)
        return {new: tensors[old] for old, new in named.items()}

    def _named_by_class(self) -> dict[str, tuple[int, Stored]]:
        """The tensors as the class names them, without the buffers that older classes stored."""
        tensors = {
            with_new_ending(name): at
            for name, at in self._by_stored_name.items()
            if self.model_type == "mra" or not _is_buffer(name, at[1].info)  # MRA still stores them
        }
        names, is_bare = class_names(self.config), any(map(_BARE.match, tensors))
        if "model_type" not in self.config or counts_beyond(self.config, max(SHARED_LAYERS, len(tensors))):
            return tensors
        # To ask the class takes seconds. One without a head ends so, and its tensors have no beginning in common.
        if not names or is_bare != bool(_HEADLESS.search(names[0])):
            with suppress(PruneError, ImportError):
                self.own_class, renamed = class_that_fits(self, tensors)
                tensors = {renamed[name]: at for name, at in tensors.items()}
        return self._without_copies(tensors)

    def _without_copies(self, tensors: dict[str, tuple[int, Stored]]) -> dict[str, tuple[int, Stored]]:
        """The tensors without copies of the table of tokens that the class ties to it."""
        sizes = [size for key, size in all_items(self.config) if key.endswith("vocab_size")]
        stored = (at[1].info for at in tensors.values())
        tables = [info.name for info in stored if len(info.shape) == 2 and info.shape[0] in sizes]
        # To ask the class takes seconds.
        if not any(starmap(self._equal, combinations(tables, 2))):
            return tensors
        copies = {
            alias
            for alias, name in ties_of(self, tensors).items()
            if alias in tensors
            and name in tensors
            and self._equal(tensors[alias][1].info.name, tensors[name][1].info.name)
        }
        return {name: at for name, at in tensors.items() if name not in copies}

    def without_root(self, module: str) -> str:
        """The name of a module of a headed model in one that may be the base model, whose names lack the beginning."""
        root, _, inner = module.partition(".")
        first, dot, _ = inner.partition(".")
        return inner if dot and root not in self._roots and first in self._roots else module

    @cached_property
    def _roots(self) -> frozenset[str]:
        return frozenset(name.partition(".")[0] for name in self.tensors)

    def _equal(self, one: str, other: str) -> bool:
        """Whether two tensors of the files hold the same values."""
        (first, a), (second, b) = self._by_stored_name[one], self._by_stored_name[other]
        return same_values((self._descriptor(first, a.spooled), a), (self._descriptor(second, b.spooled), b))

    def _samples(self) -> dict[str, bytes]:
        """Values of each tensor that enter the fingerprint."""
        return samples_of(self)


def _is_buffer(name: str, info: TensorInfo) -> bool:
    """Whether a tensor is a buffer of an older class: numbers of positions, or the mask of an attention."""
    ending = name.rpartition(".")[2]
    is_mask = ending == "bias" and len(info.shape) == 4 and info.shape[:2] == (1, 1)
    return is_mask or (ending in ("position_ids", "token_type_ids") and info.dtype == "I64")


def open_model(path: Path | str) -> Checkpoint:
    """Open a checkpoint: config.json and .safetensors or .bin files, single or sharded.

    Args:
        path: its directory, or a model of the hub, as `org/name` or `org/name@revision`; a GGUF file or the directory
            of a LoRA adapter is converted first, see `checkpoint_directory`.

    Raises:
        CheckpointError: no such directory, not a checkpoint, or a file that is missing or damaged.
        HubError: a model of the hub that cannot be had.
        PruneError: as `checkpoint_directory`.
    """
    directory = checkpoint_directory(path)
    return Checkpoint(directory, read_config(directory), find_weights(directory))


def directory_of(model: Checkpoint | Path | str, say: Say = unsaid) -> Path:
    """The directory of an open checkpoint, or of one that is named as in `open_model`.

    Args:
        say: hears what is fetched from the hub.

    Raises:
        HubError: a model of the hub that cannot be had.
    """
    return model.path if isinstance(model, Checkpoint) else checkpoint_directory(model, say=say)
