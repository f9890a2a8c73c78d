"""`load_model`: opens what prunecli writes, and the stock checkpoints of the families it knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prunecli.errors import CheckpointError, reason_of
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import Load
from prunecli.model.opening import result_config
from prunecli.model.skeleton import computed_parameters, quiet
from prunecli.modules.building import build_model, refused_by_layer
from prunecli.modules.classes import empty_model, fill_constants, fitted_class, own_config, stock_class
from prunecli.modules.cpu_linear import pack_linears, speed_up_linears
from prunecli.modules.dequantised import as_run
from prunecli.modules.devices import Devices, choose_devices, spread
from prunecli.modules.filling import missing_tensors
from prunecli.modules.fitting import fitting_dtype, need_of
from prunecli.modules.machine import give_back, keep_freed_blocks
from prunecli.modules.saving import saving_as_stored
from prunecli.modules.sparse_ffn import SparseFFN

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    path: Path | str,
    *,
    device: str | torch.device | Devices = "auto",
    dtype: str | torch.dtype = "auto",
    model_class: str | None = None,
    load: Load | None = None,
) -> PreTrainedModel:
    """Open a checkpoint as a model in evaluation mode.

    Args:
        path: a checkpoint directory, or a model of the hub as `org/name` or `org/name@revision`, which is fetched into
            the hub's cache where it is not there yet. A directory causes no request.
        device: "auto" (a GPU where there is one; where it does not hold the model, its layers are spread over all), or
            any name that torch knows.
        dtype: "float32", "bfloat16" ("bf16"), "float16" ("fp16"), or "auto": by what is stored, what the device
            multiplies well and what it has free; see `prunecli.modules.fitting`. "int8": on a CPU, for a model that
            only runs forward and is not saved; see `prunecli.modules.int8`.
        model_class: name of the class of transformers to open it as ("BartModel"), one whose tensors it has; None: the
            one that config.json names, and of NLLB-MoE the one that translates.
        load: what it will decode, for which memory is to stay free beside the weights.

    Returns:
        A `PreTrainedModel` of the family's stock class, every sparse FFN a `SparseFFN`; its `save_pretrained` writes
        what `load_model` opens. A family that is not declared, or whose mixtures its stock class runs,
        loads as plain transformers does it. Of one over several GPUs inputs go to `model.device`, as ever.

    Raises:
        CheckpointError: not a checkpoint, a damaged one, or one that is not of `model_class`.
        HubError: a model of the hub that cannot be had.
        UnsupportedModelError: neither prunecli nor transformers knows the family.
        UsageError: no such device or type.
        MemoryShortError: it does not fit in the memory that is free there; nothing has been read.
    """
    devices = device if isinstance(device, Devices) else choose_devices(str(device))
    give_back()  # of a model before this one
    with open_model(path) as stored:
        kind = fitting_dtype({"": stored}, devices, str(dtype), load=load, only_runs=True)
        memory = need_of(stored, devices, kind, load).memory()
        # What transformers would not read, or not spread, is read here, where each tensor has its place.
        is_odd = bool(stored.quantised) or (memory is not None and stored.family is None)
        is_built = is_odd and model_class is None and refused_by_layer(stored) is None
        if not stored.runs_stock or is_built or kind == torch.int8:
            checkpoint = as_run(stored, torch.float32 if kind == torch.int8 else kind)
            model = build_model(checkpoint, devices.first, kind, model_class, memory)
            model.generation_config = _generation_config(checkpoint, model)
        else:
            model = _from_pretrained(stored, kind, model_class, memory)
        if stored.runs_stock:
            model = model.to(devices.first) if memory is None else model
            own = stock_class(stored, model_class)
            if stored.has_constants:
                fill_constants(model, stored)
            elif type(model) is not own:  # fitted: one of the stock class that saves what it differs by
                model.__class__ = own
                classes = model_class and (model_class,)
                config = result_config(stored, stored.structure, tensors=model.state_dict(), classes=classes)
                model = saving_as_stored(model, stored, config)
        if devices.first.type == "cpu":
            speed_up_linears(model)
            keep_freed_blocks(stored.total_bytes)
        return model


def load_for_decoding(
    path: Path | str,
    *,
    device: str | torch.device | Devices = "auto",
    dtype: str | torch.dtype = "auto",
    load: Load | None = None,
) -> PreTrainedModel:
    """`load_model` for a model that will only decode: on a CPU the weights of its dense layers are packed for speed.

    It cannot be trained, copied, moved, cast or saved. Arguments and errors are those of `load_model`.
    """
    model = load_model(path, device=device, dtype=dtype, load=load)
    pack_linears(model)
    return model


def sparse_ffns(model: Any) -> dict[str, SparseFFN]:
    """Layer's name, as in `Structure`, -> its sparse FFN; in the order of the layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseFFN)}


def _generation_config(checkpoint: Checkpoint, model: Any) -> Any:
    from transformers import GenerationConfig

    path = checkpoint.path / "generation_config.json"
    if not path.is_file():
        return GenerationConfig.from_model_config(model.config)
    try:
        return GenerationConfig.from_pretrained(checkpoint.path, local_files_only=True)
    except Exception as error:  # whatever a value of the wrong kind runs into inside of transformers
        raise CheckpointError(
            f"{path}: cannot be read as a generation config ({reason_of(error)})", "Copy the file again."
        ) from error


def _from_pretrained(
    checkpoint: Checkpoint, dtype: torch.dtype, name: str | None, memory: Mapping[int, int] | None
) -> Any:
    """A family that prunecli does not declare, or does not run: as plain transformers opens it, by its class `name`."""
    model_class = fitted_class(checkpoint, name)
    places = None if memory is None else spread(empty_model(checkpoint, model_class, dtype=dtype), memory)
    try:
        with quiet():  # missing tensors are an error below, others are left out on purpose
            model, info = model_class.from_pretrained(
                checkpoint.path,
                config=own_config(checkpoint, model_class),
                dtype=dtype,
                device_map=places,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # of any kind, for a damaged file or value
        raise CheckpointError(
            f"{checkpoint.path}: transformers cannot load it ({reason_of(error)})",
            "Correct its config.json, or copy the directory again.",
        ) from error
    if missing := sorted({*info["missing_keys"]}.difference(computed_parameters(model))):
        raise missing_tensors(checkpoint, missing)
    return model.eval()
