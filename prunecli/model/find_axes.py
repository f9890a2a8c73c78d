"""The axes of a checkpoint: its layers, heads, hidden units, experts, tokens and channels, and where they lie."""

import re
from collections.abc import Iterator

from prunecli.architectures.records import Carrier
from prunecli.errors import CheckpointError, UnsupportedModelError, located
from prunecli.model.axes import Axis, Kind, axis_name
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.declared import with_keys
from prunecli.model.probe import template_of, unit_owner
from prunecli.tensors.side_files import MODULES_FILE, folders_of

VOCABULARY = "vocab_size"
CHANNELS = "channels"
"""Name of the axis of the residual stream."""


def axes_of(checkpoint: Checkpoint, kind: Kind) -> tuple[Axis, ...]:
    """The axes of one kind, in the order of the model.

    Raises:
        UnsupportedModelError: its class says nothing; of tokens: another size equals that of the vocabulary, so
            that an axis of one cannot be told from one of the other.
        CheckpointError: config.json or the weights are damaged.
    """
    if kind == "expert":
        return tuple(
            Axis(
                axis_name(layer.name, "expert"),
                kind,
                layer.experts,
                layer.original_experts,
                layer.side,
                layer.layer,
                carriers={name: Carrier(dim) for name, dim in layer.cut.items()},
                members=layer.expert_prefix.replace("{expert}", "{}"),
                parts=layer.expert_tensors,
            )
            for layer in checkpoint.mixtures
        )
    if kind == "token":
        size, config = vocabulary_size(checkpoint), checkpoint.config
        keys = [name for name, value in config.items() if name.endswith(VOCABULARY) and value == size]
        ids = tuple(range(size))
        carriers = _token_carriers(checkpoint)
        return (
            Axis("tokens", kind, ids, size, carriers=carriers, keys=(*vocabulary_keys(checkpoint), *keys)),
        )
    if kind == "channel":
        return (_channels(checkpoint),)
    layout = checkpoint.layout
    if kind == "head":
        return tuple(
            Axis(
                axis_name(layer.name, "head"),
                kind,
                layer.heads,
                layer.original_heads,
                layer.side,
                layer.layer,
                layer.kind,
                layer.carriers,
            )
            for layer in layout.require_heads()
        )
    if kind == "unit":
        return tuple(
            Axis(
                axis_name(ffn.name, "unit"),
                kind,
                tuple(range(ffn.count)),
                ffn.count,
                ffn.side,
                ffn.layer,
                carriers=ffn.carriers,
            )
            for ffn in layout.ffns
            if ffn.carriers and not ffn.is_shared
        ) + tuple(_expert_units(checkpoint))
    structure, axes, found = layout.structure, [], layout.family.found
    movable = {} if found is None else {one.key: one for one in found.layers if one.key in found.movable}
    for stack in layout.family.stacks:
        if found is not None and stack.depth not in movable:
            continue
        units = structure.units(stack.side, "layer", layout.sizes.depth(stack))
        members = stack.layers.replace("{layer}", "{}")
        shares = movable[stack.depth].shares if movable else {}
        name = axis_name(stack.side, "layer")
        axes.append(Axis(name, kind, units.kept, units.of, stack.side, carriers=shares, members=members))
    if not axes:
        raise UnsupportedModelError(
            f"{checkpoint.path}: no layer can be removed: there is only one (ALBERT runs it several times), a small "
            "copy of the model computes something else without one than when it skips it, or the files hold layers "
            "that its class does not have (for further tokens)"
        )
    return tuple(axes)


def _channels(checkpoint: Checkpoint) -> Axis:
    """The positions of the residual stream.

    Raises:
        UnsupportedModelError: the model is not as its class stores it, or a small copy cannot lose any.
    """
    with located(checkpoint.path):
        units, carriers = checkpoint.probed.channels
    path = checkpoint.path
    if folders_of(path) or path.name in folders_of(path.parent):
        raise UnsupportedModelError(
            f"{path}: no channels of the hidden states can be removed: other modules of sentence-transformers "
            f"({MODULES_FILE}) read as many"
        )
    whole, shapes = checkpoint.probed.whole, {name: info.shape for name, info in checkpoint.tensors.items()}
    if odd := [name for name in shapes if whole.stored.get(name) != shapes[name]]:
        raise UnsupportedModelError(
            f"{checkpoint.path}: channels of the hidden states can be removed from a stock model alone, and its class "
            f"{whole.model_class.__name__} does not store {odd[0]} as the files do"
        )
    return Axis(
        CHANNELS,
        "channel",
        tuple(range(units.held)),
        units.held,
        carriers={name: carrier for name, carrier in carriers.items() if name in shapes},
        keys=tuple(units.keys),
    )


def _expert_units(checkpoint: Checkpoint) -> Iterator[Axis]:
    """The hidden units of experts, of which all keep as many: those of each expert, or of all that are stacked."""
    layout = checkpoint.layout
    found = layout.family.found
    for key, templates in found.experts.items() if found is not None else ():
        size = layout.sizes.count(key)
        owners: dict[str, dict[str, Carrier]] = {}
        for name in checkpoint.tensors:
            if (carrier := templates.get(template_of(name))) is not None:
                owners.setdefault(unit_owner(name), {})[name] = carrier
        ids = tuple(range(size))
        for owner, carriers in owners.items():
            for stack in layout.family.stacks:
                before, after = stack.layers.split("{layer}")
                if match := re.match(rf"{re.escape(before)}(\d+){re.escape(after)}", owner):
                    name = axis_name(owner, "unit")
                    layer = int(match[1])
                    yield Axis(name, "unit", ids, size, stack.side, layer, carriers=carriers, keys=(key,))


def vocabulary_size(checkpoint: Checkpoint) -> int:
    """Rows of the token embeddings.

    Raises:
        CheckpointError: config.json holds no such number.
    """
    key, *_ = vocabulary_keys(checkpoint)
    size = checkpoint.layout.sizes.value(key)
    if type(size) is not int or size < 1:
        raise CheckpointError(f'{checkpoint.path}: config.json: "{key}" is {size!r}, not a count')
    return size


def vocabulary_keys(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The keys of config.json that hold the rows of the token embeddings.

    Raises:
        UnsupportedModelError: its class says nothing, or no key of its config is known to be it.
    """
    keys = checkpoint.require_architecture().vocabulary
    if not keys:
        raise UnsupportedModelError(
            f"{checkpoint.path}: no key of its config.json is known to hold the number of tokens and nothing else"
        )
    return keys


def _token_carriers(checkpoint: Checkpoint) -> dict[str, Carrier]:
    """Declared tensors -> the dimension that grows with the vocabulary; of the parts that only some classes of a family
    have (`final_logits_bias`, `lm_head.bias`) the one that is as long as it."""
    layout, size = checkpoint.layout, vocabulary_size(checkpoint)
    shapes = layout.shapes
    grown = layout.changed(
        config=with_keys(layout.config, dict.fromkeys(vocabulary_keys(checkpoint), size + 1))
    ).shapes
    carriers = {}
    config = checkpoint.config
    for name, info in checkpoint.tensors.items():
        if name in shapes:
            for dim, (one, other) in enumerate(zip(shapes[name], grown[name], strict=True)):
                if one != other:
                    carriers[name] = Carrier(dim)
        elif layout.is_extra(name) and size in info.shape:
            # A task head of as many labels as tokens, or of a model as wide, looks like an output layer.
            others = [key for key, value in config.items() if value == size and not key.endswith(VOCABULARY)]
            if len(config.get("id2label") or ()) == size:
                others.append("id2label")
            if others:
                raise UnsupportedModelError(
                    f"{checkpoint.path}: {name} may have an axis of tokens or of {others[0]}: both count {size}",
                    "trim-vocabulary cannot tell which; resize the embeddings by a row first.",
                )
            carriers[name] = Carrier(info.shape.index(size))
    return carriers
