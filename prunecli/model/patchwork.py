"""Stock models whose layers differ in size: fewer heads, hidden units or none, and tensors that layers share.

A stock class knows one size for all layers. Its model is made on the meta device; then each tensor gets the shape that
the checkpoint has for it, and each module the numbers that it would have in a model of its own size, the donor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from prunecli.model.axes import Carrier
from prunecli.model.layout import ModelLayout

Names = Callable[[str], str]
"""From the name of a tensor in the files to its name in a model."""


class Headless(nn.Module):
    """In the place of a linear layer of an attention where no head is left.

    Classes look up the type, the device and the initial values of what they take for a linear layer.

    Args:
        stock: the module that it replaces.
        width: of what it makes.
    """

    weight: Tensor

    def __init__(self, stock: Any, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("weight", stock.weight.new_empty(0, 0), persistent=False)


class NoHeads(Headless):
    """In the place of a projection to queries, keys or values, or of a table: one head of zeros.

    A head of zeros, rather than none, keeps caches and shapes of the stock module valid.
    """

    def __init__(self, stock: nn.Module, width: int) -> None:
        super().__init__(stock, width)
        self.is_table = isinstance(stock, nn.Embedding)

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., d_model]`, or numbers of rows `[...]`, -> zeros `[..., width]`."""
        shape = inputs.shape if self.is_table else inputs.shape[:-1]
        return self.weight.new_zeros(*shape, self.width)


class OnlyBias(Headless):
    """In the place of an output projection: its bias stays."""

    def __init__(self, stock: nn.Module, width: int) -> None:
        super().__init__(stock, width)
        self.bias: nn.Parameter | None = getattr(stock, "bias", None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., one head]` -> the bias, or zeros, `[..., d_model]`."""
        made = hidden_states.new_zeros(*hidden_states.shape[:-1], self.width)
        return made if self.bias is None else made + self.bias


class OwnCounts:
    """The config of one attention: the model's own, but for its counts of heads."""

    def __init__(self, config: Any, counts: Mapping[str, Any]) -> None:
        self.__dict__ |= {**counts, "_config": config}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_config" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._config, name)


def fitted(stock: Any, fit: Callable[[Any], None]) -> Any:
    """A subclass of a class of transformers whose models are fitted at their making, before they have values."""

    def make(self: Any, config: Any) -> None:
        stock.__init__(self, config)
        fit(self)

    return subclass(stock, __init__=make)


def subclass(stock: Any, **members: Any) -> Any:
    """A subclass of a class of transformers with other members, under the same name."""
    return type(
        stock.__name__, (stock,), {"__module__": stock.__module__, "__doc__": stock.__doc__, **members}
    )


def fit_layers(model: Any, layout: ModelLayout, names: Names) -> None:
    """Give each layer of a model, made on the meta device, what the checkpoint of a found family has in it.

    Args:
        names: of tensors in the model.
    """
    found = layout.family.found
    aliases: dict[str, str] = {}
    for layer in layout.attentions:
        aliases |= {own: stored for own, stored in layer.shared_tensors.items() if own != stored}
        if not layer.is_shared and layer.num_heads != layer.stated_heads:
            units, kept = found.uneven[layer.spec.heads], layer.num_heads
            donor = found.skeleton.donor(units.donor(max(kept, 1)))
            fit_sizes(model, donor, names, layer.tensors, kept, layer.stated_heads)
    for ffn in layout.ffns:
        key, held = ffn.stack.ffn.width, layout.sizes.count(ffn.stack.ffn.width)
        if ffn.is_shared:
            aliases |= {f"{ffn.name}.{suffix}": f"{ffn.prefix}{suffix}" for suffix in ffn.tensors}
        elif ffn.tensors and ffn.width != held:
            carriers = {
                f"{ffn.prefix}{suffix}": Carrier(dim, (1,) * ffn.blocks[suffix])
                for suffix, dim in ffn.tensors.items()
                if dim is not None
            }
            fit_sizes(model, found.skeleton.donor({key: ffn.width}), names, carriers, ffn.width, held)
    tied = {names(own): names(stored) for own, stored in aliases.items()}
    for own, stored in tied.items():
        model.set_submodule(own.rpartition(".")[0], model.get_submodule(stored.rpartition(".")[0]))
    model.all_tied_weights_keys |= tied


def fit_sizes(
    model: Any,
    donor: Any,
    names: Names,
    carriers: Mapping[str, Carrier],
    kept: int,
    held: int,
) -> None:
    """Give what one axis of a model, made on the meta device, runs through the size of `kept` of its `held` units.

    Args:
        donor: of the same class, made with so many units; with one where none is kept.
        names: of tensors in the model.
        carriers: of the axis: name of a tensor in files -> where the units lie.
    """
    places = {names(name): carrier for name, carrier in carriers.items()}
    owner = common_owner(places)
    for path, module in model.get_submodule(owner).named_modules():
        other = donor.get_submodule(".".join(filter(None, (owner, path))))
        if not [*module.children()] and [*module.parameters()]:
            continue  # its sizes are those of its tensors
        for name, value in _numbers(other):
            if value != getattr(module, name, None):
                setattr(module, name, value)
        config = getattr(module, "config", None)
        if config is not None:
            counts = {
                name: value for name, value in _numbers(other.config) if value != getattr(config, name, None)
            }
            aliases = type(config).attribute_map.items()
            counts |= {alias: counts[name] for alias, name in aliases if name in counts}
            module.config = OwnCounts(config, counts)
    for place, carrier in places.items():
        path, _, attribute = place.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, (NoHeads, OnlyBias)):
            continue
        shape = list(getattr(module, attribute).shape)
        unit = carrier.unit(shape[carrier.dim], held)
        shape[carrier.dim] = unit * sum(carrier.blocks) * kept
        if kept:
            resize(module, attribute, tuple(shape))
        elif attribute == "weight" and is_output(module, carrier):
            others = math.prod(size for dim, size in enumerate(shape) if dim != carrier.dim)
            model.set_submodule(path, OnlyBias(module, others))
        elif attribute == "weight":
            model.set_submodule(path, NoHeads(module, unit * sum(carrier.blocks)))


def is_output(module: nn.Module, carrier: Carrier) -> bool:
    """Whether the heads are what a linear layer reads."""
    is_turned = hasattr(module, "nf")  # GPT-2's Conv1D, whose weight is [in, out]
    return not isinstance(module, nn.Embedding) and carrier.dim == (0 if is_turned else 1)


def common_owner(names: Mapping[str, Any]) -> str:
    """The module that holds all the modules of these tensors; "" where the model itself does."""
    first, *others = (name.split(".")[:-1] for name in names)
    depth = next(
        (
            number
            for number, piece in enumerate(first)
            if any(o[number : number + 1] != [piece] for o in others)
        ),
        len(first),
    )
    return ".".join(first[:depth])


def resize(module: Any, attribute: str, shape: tuple[int, ...]) -> None:
    """Give a linear layer's weight or bias another shape; its values are lost."""
    parameter = getattr(module, attribute)
    empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    setattr(module, attribute, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    if attribute != "weight":
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    elif hasattr(module, "nf"):  # as above
        module.nx, module.nf = shape


def _numbers(owner: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of its attributes that are whole numbers, or several of them."""
    for name, value in vars(owner).items():
        several = value if isinstance(value, (list, tuple)) else (value,)
        if not name.startswith("_") and several and all(type(one) is int for one in several):
            yield name, value
