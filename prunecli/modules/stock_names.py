"""Names of tensors in the files of a model, and in its class: both ways.

From the files to the class by transformers' own rules for opening a checkpoint, of whose conversions those alone are
followed that stack experts. Back by its rules for saving one, which are the same turned round.
"""

from typing import Any

import torch

from prunecli.errors import UnsupportedModelError
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.patchwork import placed
from prunecli.model.skeleton import stored_form
from prunecli.model.sparse_layer import SparseLayer

REMEDY = "Leave `memory` out on a machine that holds the model."


class StockNames:
    """From names in the checkpoint to those of the model, as transformers turns them."""

    def __init__(self, checkpoint: Checkpoint, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        self.model = model
        self._path, self._runs_stock = checkpoint.path, checkpoint.runs_stock
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def stacked(self, name: str) -> tuple[str, int] | None:
        """Parameter of the model whose first axis is the expert, and the place among those that its rows come from.

        None where the tensor is not converted.

        Raises:
            UnsupportedModelError: it is turned into something else.
        """
        found, rule, pattern = self._turned(name)
        if rule is None:
            return None
        kinds = [type(operation).__name__ for operation in rule.operations]
        axes = [getattr(operation, "dim", None) for operation in rule.operations]
        known = (["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1])
        if (kinds, axes) not in known or len(rule.target_patterns) != 1:
            raise self.refusal(name)
        # Patterns are completed where they are given; their order stays.
        return found, list(rule.source_patterns).index(pattern)

    def parameter(self, name: str) -> str:
        """The name in the model of what a tensor ends up in, converted or not."""
        return self._turned(name)[0]

    def _turned(self, name: str) -> tuple[str, Any, str | None]:
        """Parameter that a tensor ends up in; and the rule that converts it and its pattern, or None if none does."""
        for rule in self._renamings:
            name, _ = rule.rename_source_key(name)
        for rule in self._converters:
            found, pattern = rule.rename_source_key(name)
            if pattern is not None:
                return str(found), rule, pattern
        return placed(self.model, name) or name, None, None

    def of_experts(self, layer: SparseLayer) -> dict[str, int | None]:
        """Name in the model of what a layer's experts end up in -> number of the expert; None: they are stacked."""
        if not self._runs_stock:  # a `SparseFFN`
            own = self.place(layer.name)
            return {f"{own}.{suffix.replace('.', '_')}": None for suffix in layer.expert_tensors}
        found: dict[str, int | None] = {self.parameter(name): None for name in layer.stacked_tensors}
        for suffix in layer.expert_tensors:
            for number in range(layer.num_experts):
                name = self.parameter(layer.expert_tensor(number, suffix))
                if name in found and number:
                    found[name] = None
                    break
                found[name] = number
        return found

    def refusal(self, name: str) -> UnsupportedModelError:
        """Transformers makes something else of a tensor."""
        return UnsupportedModelError(
            f"{self._path}: transformers turns {name} into another tensor, which prunecli does not do layer by layer",
            REMEDY,
        )

    def place(self, name: str) -> str:
        """The name in the model of a tensor that is not converted; with or without the prefix of the base model.

        Raises:
            UnsupportedModelError: it is turned into something else.
        """
        found, rule, _ = self._turned(name)
        if rule is not None:
            raise self.refusal(name)
        return found


def not_run(model: Any, source: Checkpoint) -> tuple[str, ...]:
    """Names of the tensors of `source` that `model`, loaded of it, has no place for: of layers for further tokens, say.

    Raises:
        UnsupportedModelError: what the model holds is not what `source` does under other names; nothing could be
            written as it was stored.
    """
    held = stored_form(model, {name: tensor.to("meta") for name, tensor in model.state_dict().items()})
    tied = {*stored_form(model, {alias: torch.empty(0) for alias in model.all_tied_weights_keys})}
    odd = [
        name
        for name, tensor in held.items()
        if (tuple(tensor.shape) != source.info(name).shape if name in source.tensors else name not in tied)
    ]
    if odd:
        raise UnsupportedModelError(
            f"{source.path}: transformers reads its tensors otherwise than it writes them ({odd[0]})",
            "Open it with transformers and save it once, then train what that wrote.",
        )
    return tuple(name for name in source.tensors if name not in held)
