"""`save_pretrained` of a loaded model: the family's stock tensor names, and config.json with its `Structure`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import TIE_KEY
from prunecli.model.opening import SHIM_FILE, shim_classes, shim_source
from prunecli.model.patchwork import module_name
from prunecli.model.skeleton import subclass
from prunecli.model.sparse_layer import SparseLayer
from prunecli.model.structure import KEY, WEIGHTS_KEY
from prunecli.modules.filling import DTYPES
from prunecli.tensors.json_files import parsed
from prunecli.tensors.stream import Copy, Output
from prunecli.tensors.writer import INDEX_FILE, SHARD_BYTES, SINGLE_FILE, header_bytes, in_place

REFUSED = {
    "push_to_hub": "save to a directory first, then upload that directory.",
    "variant": "save under the plain names; give each variant a directory of its own.",
    "distributed_checkpoint": "save the whole model from one process.",
}
"""Options of transformers' `save_pretrained` that would write what nothing opens."""


class SavesAsStored:
    """Mixed into the stock class of a loaded model: what it saves says how the model differs from the class's own.

    Stacked experts, which a stock class lacks, it saves under their names in files: what transformers would write, the
    stock class would open and fill the experts with random numbers.
    """

    _stock: Any
    _stored_config: Mapping[str, Any]
    _stored_layers: Sequence[SparseLayer] = ()
    _shared_names: Mapping[str, str] = {}
    _own_ties: Mapping[str, str] | None = None

    def tie_weights(self, *arguments: Any, **options: Any) -> None:
        """Tie what is one in this model: not the output layer to an input table that it no longer has."""
        if self._own_ties is None:
            super().tie_weights(*arguments, **options)  # type: ignore[misc]
        else:
            tie_parameters(self, *arguments, **options)

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        """Resize the embeddings as transformers does, if both are ordinary tables.

        Raises:
            ValueError: they are not.
        """
        if self._own_ties is None:
            return super().resize_token_embeddings(*arguments, **options)  # type: ignore[misc]
        raise ValueError(
            "factorised embeddings cannot be resized: resize the model's first, then factorise them."
        )

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write the model as a checkpoint that `prunecli.load_model` opens; options as in transformers.

        Raises:
            ValueError: `push_to_hub`, `variant` or `distributed_checkpoint` is asked for.
        """
        for option, remedy in REFUSED.items():
            if options.get(option):
                raise ValueError(f"{option}={options[option]}: not for a model that prunecli loads; {remedy}")
        model: Any = self
        state = options.pop("state_dict", None)
        state = stock_names(model.state_dict() if state is None else state, self._stored_layers)
        options["state_dict"] = without_shared(state, self._shared_names)
        if any(parameter.is_cuda for parameter in model.parameters()):
            # All tensors of a file are on the host at once; transformers' files are of 50 GB.
            options.setdefault("max_shard_size", SHARD_BYTES)
        super().save_pretrained(save_directory, **options)  # type: ignore[misc]
        directory = Path(save_directory)
        if not options.get("is_main_process", True) or not directory.is_dir():
            return
        # An earlier save of another number of files left what would be opened in place of the new ones: transformers
        # removes the old shards itself, but neither the one file nor the index.
        is_sharded = any(directory.glob("model-*-of-*.safetensors"))
        (directory / (SINGLE_FILE if is_sharded else INDEX_FILE)).unlink(missing_ok=True)
        path = directory / "config.json"
        values = {**parsed(path.read_bytes()), **self._stored_config}
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if classes := shim_classes(values):
            (directory / SHIM_FILE).write_text(shim_source(classes), encoding="utf-8")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time, so that pickle cannot find it under its name.
        return _empty, (self._stock,), self.__dict__


def tie_parameters(model: Any, missing_keys: set[str] | None = None, **_: Any) -> None:
    """`PreTrainedModel.tie_weights` by `all_tied_weights_keys`; biases keep their length.

    The stock method gives each bias as many entries as the tied weight has rows, which are others in GPT-2's layers.
    As it does, this leaves two apart that have been read and differ.

    Args:
        missing_keys: parameters that have no values yet; None: those on the meta device.
    """
    missing = missing_keys
    if missing is None:
        held_twice = model.named_parameters(remove_duplicate=False)
        missing = {name for name, value in held_twice if value.is_meta}
    for alias, name in model.all_tied_weights_keys.items():
        absent, held = (name, alias) if name in missing and alias not in missing else (alias, name)
        is_read = missing_keys is not None and absent not in missing
        if is_read and not torch.equal(model.get_parameter(alias), model.get_parameter(name)):
            continue
        owner, _, attribute = absent.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(held))
        missing.discard(absent)


def saving_as_stored(model: Any, checkpoint: Checkpoint, config: Mapping[str, Any]) -> Any:
    """`model`, which from now on saves itself as it was stored; still an instance of its stock class.

    Args:
        model: made of `checkpoint`.
        config: config.json of what is saved; what stock classes do not know of it is written again.
    """
    stock: Any = type(model)
    model.__class__ = _saving_class(stock)
    mixture = checkpoint.resolved.family.mixture
    # T5's class changes what its config says of ties.
    keys = (
        "model_type",
        "architectures",
        KEY,
        "auto_map",
        WEIGHTS_KEY,
        TIE_KEY,
        *(mixture.counts if mixture else ()),
    )
    model._stored_config = {key: config[key] for key in keys if key in config}
    if not checkpoint.runs_stock:
        model._stored_layers = tuple(
            replace(
                layer,
                name=module_name(model, layer.name),
                expert_prefix=module_name(model, layer.expert_prefix),
            )
            for layer in checkpoint.mixtures
        )
    return model


def stock_names(state: Mapping[str, Tensor], layers: Sequence[SparseLayer]) -> dict[str, Tensor]:
    """A state dict of `SparseFFN`s under the names of the stock layout; the experts' tensors are views.

    What `state` leaves out, or already holds under its stock name, stays so.
    """
    names = dict(state)
    for layer in layers:
        for suffix in layer.expert_tensors:
            stacked = names.pop(f"{layer.name}.{suffix.replace('.', '_')}", None)
            if stacked is not None:
                for expert in range(layer.num_experts):
                    names[layer.expert_tensor(expert, suffix)] = _own_storage(stacked[expert])
    return names


def save_tensors(
    tensors: Mapping[str, Any], path: Path, fetch: Callable[[Any], Tensor] = lambda tensor: tensor
) -> None:
    """Write a safetensors file, by name, tensor after tensor: of those on a GPU one at a time is on the host too.

    Args:
        tensors: tensors, or other values with `dtype` and `shape`.
        fetch: returns the tensor of a value.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    outputs = [
        Output(name, names[tensors[name].dtype], tuple(tensors[name].shape), Copy(name))
        for name in sorted(tensors)
    ]
    ordered = in_place(outputs)
    with path.open("wb") as file:
        file.write(header_bytes(ordered))
        for output in ordered:
            values = fetch(tensors[output.name]).detach().cpu().contiguous()
            file.write(values.view(-1).view(torch.uint8).numpy().data)


def without_shared(state: Mapping[str, Tensor], shared: Mapping[str, str]) -> dict[str, Tensor]:
    """A state dict in which each shared tensor is left under its owner's name alone, whichever of them `state` has."""
    names = {name: value for name, value in state.items() if name not in shared}
    for name, owner in shared.items():
        if name in state:
            names.setdefault(owner, state[name])
    return names


def _own_storage(view: Tensor) -> Tensor:
    """Return a tensor in a storage of its own over the same memory: transformers clones tensors of one storage."""
    if type(view.detach()) is not Tensor or view.is_meta or not view.is_contiguous():
        return view
    start = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[start : start + view.numel() * view.element_size()]
    tensor: Tensor = torch.empty(0, dtype=view.dtype, device=view.device)
    tensor.set_(storage, 0, view.shape)  # type: ignore[call-overload]
    return tensor


@cache
def _saving_class(stock: Any) -> Any:
    return subclass(stock, SavesAsStored, _stock=stock)


def _empty(stock: Any) -> Any:
    """Return an empty instance that pickle and copy fill."""
    return object.__new__(_saving_class(stock))
