"""Stock models whose layers differ in size: fewer heads, hidden units or none, and tensors that layers share.

A stock class knows one size for all layers. Its model is made on the meta device; then each tensor gets the shape that
the checkpoint has for it, and each module the numbers that it would have in a model of its own size, the donor.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from prunecli.architectures.records import Attention, Carrier, FeedForward, Stack
from prunecli.model.axes import module_of
from prunecli.model.layout import ModelLayout
from prunecli.model.parts import AttentionLayer
from prunecli.model.probe import UnitKeys, common_owner, with_scaled
from prunecli.model.skeleton import Skeleton, subclass
from prunecli.private import ATTENTION_FUNCTION

SUBSET = "prunecli_heads"
"""Name of the attention function that takes a position bias of all heads."""

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


class Nothing(nn.Module):
    """In the place of an FFN, or a projection, that is removed: zeros, or the residual that it is given to add to.

    Args:
        stock: the module that it replaces.
        like_input: whether the zeros have the shape of the input; else they have no axes.
    """

    def __init__(self, stock: nn.Module, *, like_input: bool) -> None:
        super().__init__()
        self.names, self.like_input = [*inspect.signature(stock.forward).parameters], like_input

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Input `[..., d]` -> zeros `[..., d]` or `[]`, of its type; plus a residual (BLOOM, MPT)."""
        given = {**dict(zip(self.names, inputs, strict=False)), **named}
        states = next(iter(given.values()))
        zeros = torch.zeros_like(states) if self.like_input else states.new_zeros(())
        made: Tensor = zeros + given.get("residual", 0)
        return made


class NoAttention(nn.Module):
    """In the place of an attention that is removed.

    A decoder's cache counts the tokens of its layers: self-attention keeps one zero a token in it.

    Args:
        layer: its number in the stack, under which the cache knows it; None: it has none (cross-attention, an encoder).
        position_bias: whether it is given a position bias and returns one, between its output and its weights.
    """

    def __init__(self, layer: int | None, *, position_bias: bool) -> None:
        super().__init__()
        self.layer, self.position_bias = layer, position_bias

    def forward(self, hidden_states: Tensor, *more: Any, **options: Any) -> tuple[Tensor | None, ...]:
        """Hidden states `[batch, T, d_model]` -> 0 `[]`, and no weights."""
        zero = hidden_states.new_zeros(())
        # Classes call it past_key_values, cache, or layer_past.
        caches = (one for one in (*more, *options.values()) if isinstance(one, Cache))
        if self.layer is not None and (cache := next(caches, None)) is not None:
            zeros = zero.expand(len(hidden_states), 1, hidden_states.shape[1], 1)
            # An encoder-decoder's cache has one of its own for each of both kinds.
            getattr(cache, "self_attention_cache", cache).update(zeros, zeros, self.layer)
        return (zero, options.get("position_bias"), None) if self.position_bias else (zero, None)


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


def fit_layers(model: Any, layout: ModelLayout, skeleton: Skeleton, names: Names) -> dict[str, str]:
    """Give each layer of a model, made on the meta device, what the checkpoint has in it.

    Modules of layers that share tensors become one, whose parameters are there once. An attention that shares stays a
    module of its own, which knows its place in a cache, its window and its positions.

    Args:
        skeleton: of the model.
        names: of tensors in the model.

    Returns:
        Name in the model -> name of the tensor that it shares.
    """
    aliases: dict[str, str] = {}
    for layer in layout.attentions:
        aliases |= layer.shared_tensors
        if layer.removed:
            remove_attention(model, layer.stack, layer.spec, layer.layer, names)
        elif not layer.is_whole:
            if layer.count != layer.stated:
                donor = skeleton.donor(_donor_values(layout, layer, skeleton))
                fit_sizes(model, donor, names, layer.carriers, layer.count, layer.stated)
            if layer.spec.position_bias:
                pick_bias(submodule(model, layer.name), layer.heads, layer.stated)
    for ffn in layout.ffns:
        aliases |= ffn.shared_tensors
        if ffn.removed:
            remove_ffn(model, ffn.stack, ffn.stack.ffn, ffn.layer, names)
        elif ffn.carriers and ffn.count != ffn.stated:
            donor = skeleton.donor({ffn.spec.width: ffn.count})
            fit_sizes(model, donor, names, ffn.carriers, ffn.count, ffn.stated)
    tied = {names(own): names(stored) for own, stored in aliases.items()}
    for own, stored in tied.items():
        path, _, attribute = own.rpartition(".")
        module, source = model.get_submodule(path), model.get_submodule(module_of(stored))
        if [*module.children()]:  # an attention that holds a tensor itself
            setattr(module, attribute, getattr(source, attribute))
        else:
            model.set_submodule(path, source)
    return tied


def _donor_values(layout: ModelLayout, layer: AttentionLayer, skeleton: Skeleton) -> dict[str, Any]:
    """Return the config values of a model with as many heads as an attention keeps, each as wide as here."""
    family, kept = layout.family, max(layer.count, 1)
    if family.found is not None:
        values: dict[str, Any] = family.found.uneven[layer.spec.heads].donor(kept)
        return values
    return with_scaled(UnitKeys({layer.spec.heads: 1}, layer.stated, {}), skeleton).donor(kept)


def remove_ffn(model: Any, stack: Stack, spec: FeedForward, layer: int, names: Names) -> None:
    """Let the FFN of a layer add nothing: LN(h + F(h)) and h + F(LN(h)) become h where the norm is its own.

    Args:
        names: of tensors in the model.
    """
    prefix = stack.layers.format(layer=layer)
    _remove_norms(model, prefix, spec.norms, names)
    own = [one.name for one in spec.tensors]
    if spec.name:
        paths = {_module(f"{prefix}.{spec.name}", own[0], names)}
    else:
        paths = {module_of(names(f"{prefix}.{name}")) for name in own}
    for path in paths:
        model.set_submodule(path, Nothing(model.get_submodule(path), like_input=True))


def remove_attention(model: Any, stack: Stack, spec: Attention, layer: int, names: Names) -> None:
    """Let an attention of a layer add nothing: LN(h + A(h)) and h + A(LN(h)) become h where the norm is its own.

    Args:
        names: of tensors in the model.
    """
    prefix = stack.layers.format(layer=layer)
    _remove_norms(model, prefix, spec.norms, names)
    owner = spec.projections or spec.name
    inner = next(name for one in spec.tensors if (name := one.name.removeprefix(f"{owner}.")) != one.name)
    module, mixer = (
        _module(f"{prefix}.{owner}", inner, names),
        _module(f"{prefix}.{spec.output}", "weight", names),
    )
    number = layer if (stack.side, spec.kind) == ("decoder", "self") else None  # no other has a cache
    model.set_submodule(module, NoAttention(number, position_bias=spec.position_bias))
    if not mixer.startswith(f"{module}."):
        model.set_submodule(mixer, Nothing(model.get_submodule(mixer), like_input=False))


def _remove_norms(model: Any, layer: str, norms: Iterable[str], names: Names) -> None:
    for norm in norms:
        model.set_submodule(_module(f"{layer}.{norm}", "weight", names), nn.Identity())


def _module(owner: str, tensor: str, names: Names) -> str:
    """The name in a model of the module that files call `owner`, by one of its tensors, whose own name may differ."""
    return names(f"{owner}.{tensor}").rsplit(".", tensor.count(".") + 1)[0]


def pick_bias(attention: Any, heads: Sequence[int], held: int) -> None:
    """Have an attention that is given the position bias of all `held` heads use that of its own `heads`."""
    from transformers import AttentionInterface

    own = [*heads] or [0]
    if not hasattr(sys.modules[type(attention).__module__], "eager_attention_forward"):
        names = [*inspect.signature(attention.forward).parameters]
        attention.register_forward_pre_hook(partial(_given_own, own, held, names), with_kwargs=True)
        return
    AttentionInterface.register(SUBSET, _attend)
    attention.heads, attention.n_heads = own, held
    # Where it is given no bias, it makes one for all heads.
    attention.stock_config = attention.config
    attention.config = OwnCounts(attention.config, {ATTENTION_FUNCTION: SUBSET})


def _given_own(heads: list[int], held: int, names: list[str], _attention: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of an attention, with the part of the bias of all heads that belongs to its own.

    A bias is `[batch or 1, held, T, T]`, or of slopes (ALiBi) `[held, 1, T]` or `[batch * held, 1, T]`.
    """

    def own(name: str, value: Any) -> Any:
        dims = getattr(value, "ndim", 0)
        if dims == 4 and value.shape[1] == held:
            return value[:, heads]
        if dims == 3 and name in ("alibi", "position_bias"):
            return value.unflatten(0, (-1, held))[:, heads].flatten(0, 1)
        return value

    return tuple(map(own, names, args)), {name: own(name, value) for name, value in kwargs.items()}


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The stock attention function over the part of `position_bias` that belongs to the module's heads."""
    from transformers import AttentionInterface

    bias = options.pop("position_bias", None)
    if bias is not None:
        bias = bias[:, module.heads]
    eager = sys.modules[type(module).__module__].eager_attention_forward
    attend = AttentionInterface().get_interface(getattr(module.stock_config, ATTENTION_FUNCTION), eager)
    result: tuple[Tensor, Tensor | None] = attend(
        module, query, key, value, mask, position_bias=bias, **options
    )
    return result


def module_name(model: Any, name: str) -> str:
    """The name in `model` of the module or tensor that the files call `name`.

    A base model lacks the first part of the names; some classes have others than their files.
    """
    prefix = f"{model.base_model_prefix}."
    own = name if hasattr(model, model.base_model_prefix) else name.removeprefix(prefix)
    if has_part(model, own):
        return own
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    rules = [one for one in get_model_conversion_mapping(model) if not isinstance(one, WeightConverter)]
    for dot in ("", "."):  # which some rules ask for behind the name of a module
        renamed = name + dot
        for rule in rules:
            renamed, _ = rule.rename_source_key(renamed)
        if (found := placed(model, renamed.removesuffix("."))) is not None:
            return found
    return own


def submodule(model: Any, name: str) -> Any:
    """The module in `model` that the files call `name`."""
    return model.get_submodule(module_name(model, name))


def placed(model: Any, name: str) -> str | None:
    """The name as it is, or with or without the prefix of the base model: what the model has. None: it has neither."""
    prefix = f"{model.base_model_prefix}."
    places = (name, prefix + name, name.removeprefix(prefix))
    return next((place for place in places if has_part(model, place)), None)


def has_part(model: Any, name: str) -> bool:
    """Whether the model has a module, parameter or buffer of the name."""
    try:
        return isinstance(attrgetter(name)(model), Tensor | nn.Module)
    except AttributeError:
        return False


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
    is_layer = owner.rpartition(".")[2].isdecimal()  # it has parts of other sizes besides
    for path, module in (
        [("", model.get_submodule(owner))] if is_layer else model.get_submodule(owner).named_modules()
    ):
        other = donor.get_submodule(".".join(filter(None, (owner, path))))
        if not [*module.children()] and [*module.parameters()]:
            continue  # its sizes are those of its tensors
        for name, value in _numbers(other):
            if value != getattr(module, name, None):
                setattr(module, name, value)
        config = getattr(module, "config", None)
        if config is not None:
            # Read as they are stored: a config with settings for single layers refuses to tell what they replace.
            stated = vars(vars(config).get("_config", config)) | vars(config)
            counts = {name: value for name, value in _numbers(other.config) if value != stated.get(name)}
            aliases = config.attribute_map.items()
            counts |= {alias: counts[name] for alias, name in aliases if name in counts}
            module.config = OwnCounts(config, counts)
    for place, carrier in places.items():
        path, _, attribute = place.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, (NoHeads, OnlyBias)):
            continue
        shape = list(getattr(module, attribute).shape)
        size = shape[carrier.dim]
        shape[carrier.dim] = carrier.length(kept, size, held)
        if kept:
            resize(module, attribute, tuple(shape))
        elif attribute != "weight":
            continue
        # Whether a linear layer reads the heads. The weight of GPT-2's Conv1D is [in, out].
        elif not isinstance(module, nn.Embedding) and carrier.dim == (0 if hasattr(module, "nf") else 1):
            others = math.prod(size for dim, size in enumerate(shape) if dim != carrier.dim)
            model.set_submodule(path, OnlyBias(module, others))
        else:
            model.set_submodule(path, NoHeads(module, carrier.length(1, size, held)))


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
