"""`save_pretrained` of a loaded model: the family's stock tensor names, and config.json with its `Structure`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from prunecli.checkpoint.layout import SparseLayer
from prunecli.checkpoint.structure import KEY
from prunecli.modules.shim import SHIM_FILE, SHIM_SOURCE


class SavesAsStored:
    """Mixed into the stock class of a loaded model, whose own `save_pretrained` knows nothing of stacked experts.

    What it would write, the stock class would open and fill the experts with random numbers.
    """

    _stored_config: Mapping[str, Any]
    _stored_layers: Sequence[SparseLayer]

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """Write the model as a checkpoint that `prunecli.load_model` opens; options as in transformers.

        The tensors of stacked experts are written from views, with no second copy of the weights.

        Raises:
            ValueError: `push_to_hub` is asked for.
        """
        if options.get("push_to_hub"):
            raise ValueError("push_to_hub: save to a directory first, then upload that directory.")
        model: Any = self
        state = options.pop("state_dict", None)
        state = stock_names(model.state_dict() if state is None else state, self._stored_layers)
        super().save_pretrained(save_directory, state_dict=state, **options)  # type: ignore[misc]
        if not options.get("is_main_process", True):
            return
        path = Path(save_directory) / "config.json"
        values = {**json.loads(path.read_text(encoding="utf-8")), **self._stored_config}
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if Path(SHIM_FILE).stem in str(values.get("auto_map")):
            (Path(save_directory) / SHIM_FILE).write_text(SHIM_SOURCE, encoding="utf-8")


def saving_as_stored(
    model: Any, config: Mapping[str, Any], layers: Sequence[SparseLayer], counts: Sequence[str]
) -> Any:
    """`model`, which from now on saves itself as it was stored; still an instance of its stock class.

    Args:
        config: config.json of the checkpoint; what stock classes do not know of it is written again.
        layers: its sparse layers.
        counts: keys of `config` that hold the number of experts.
    """
    stock = type(model)
    model.__class__ = type(stock.__name__, (SavesAsStored, stock), {"__module__": stock.__module__})
    model._stored_config = {
        key: config[key] for key in ("model_type", KEY, "auto_map", *counts) if key in config
    }
    model._stored_layers = tuple(layers)
    return model


def stock_names(state: Mapping[str, Tensor], layers: Sequence[SparseLayer]) -> dict[str, Tensor]:
    """A state dict of `SparseFFN`s under the names of the stock layout; the experts' tensors are views."""
    names = dict(state)
    for layer in layers:
        for name in layer.router_tensors:
            names[name] = names.pop(f"{layer.name}.router.{name.rpartition('.')[2]}")
        for suffix in layer.expert_tensors:
            stacked = names.pop(f"{layer.name}.{suffix.replace('.', '_')}")
            for expert in range(layer.num_experts):
                names[layer.expert_tensor(expert, suffix)] = stacked[expert]
    return names
