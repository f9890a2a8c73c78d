"""The axes of a model, found by asking its class: one key of config.json is changed, and what moves is seen.

Nothing is declared. The name of a key says no more than that it is worth a try; what it moves says what it is.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product, takewhile
from typing import Any

from prunecli.architectures.records import Carrier
from prunecli.model.axes import module_of, renaming
from prunecli.model.declared import value_of
from prunecli.model.names import layer_of
from prunecli.model.skeleton import Changes, Shape, Skeleton

WIDTH = re.compile(r"intermediate|ffn|(^|_)ff(_|$)|^dff$|inner|mlp|feed_?forward|hidden_dim$")
UNSTATED = "(width)"
"""In the place of a key of FFNs whose width follows from other sizes."""
VOCABULARY = re.compile(r"(?<!type_)vocab_size(_per_layer_input)?$")
_HEADS = re.compile(r"heads?($|_kv$|_key_value$)|kv_heads")
_KEY_VALUE = re.compile(r"kv|key_value")
_NO_COUNT = re.compile(r"dim|size|width|index")
HEAD_WIDTHS = ("head_dim", "d_kv", "attention_head_dim", "head_size", "kv_channels")
HIDDEN = ("hidden_size", "d_model", "n_embd")
MIXES = re.compile(r"down|output|fc2|w2|\.wo\.")
"""What is found in the names of the weights by which experts mix their hidden units."""
_TABLE = re.compile(r"bias\.weight$|embeddings?\.weight$")
_NUMBERED = re.compile(r"_layers$|layers?_idx|layer_ids$")
_LISTS = ("layers_block_type", "layer_types")
_FIRST = re.compile(r"first_k_dense|num_dense_layers|n_dense_layers|dense_layers$")
_LAST = re.compile(r"num_kv_shared_layers$")
PERIOD = ("decoder_sparse_step", "mlp_only_layers")
OTHER_SENSES = re.compile(r"vision|audio|image|speech|codec|video")


@dataclass(frozen=True)
class LayerKey:
    """Layers that one key counts.

    Attributes:
        key: of config.json, that counts them, or whose list has an entry for each.
        prefixes: what the names of their tensors begin with in files; several where lists of modules grow together.
        modules: the same in the model.
        depth: how many layers there are.
        lists: keys of lists with an entry a layer.
        numbered: keys of lists of numbers of layers.
        first: keys of how many of the first layers differ from the others.
        last: keys of how many of the last layers do.
        by_number: keys of objects whose keys are numbers of layers.
        period: key of a period by which layers differ, and key of the list of layers that do not follow it.
        samples: numbers of the first two and the last two layers, and of the first of each other kind of layer.
        shares: name of a tensor outside of the layers that holds a share for each of them -> where the shares lie.
        tables: names, within a layer, of tensors that the first layer alone has beside those of the others, and that
            all use: of relative positions. Whichever layer is the first has them.
    """

    key: str
    prefixes: tuple[str, ...]
    modules: tuple[str, ...]
    depth: int
    lists: tuple[str, ...]
    numbered: tuple[str, ...]
    first: tuple[str, ...]
    last: tuple[str, ...]
    by_number: tuple[str, ...]
    period: tuple[str, str] | None
    samples: tuple[int, ...] = ()
    shares: Mapping[str, Carrier] = field(default_factory=dict, compare=False)
    tables: tuple[str, ...] = ()

    def renamed(self, names: Iterable[str], kept: Sequence[int]) -> dict[str, str]:
        """Name of a tensor in the model with these layers alone -> its name before, of those that are in it."""
        rename = renaming(dict.fromkeys(self.prefixes, kept))
        tables = {f"{prefix}.0.{table}" for prefix in self.prefixes for table in self.tables}
        return {new: name for name in names if (new := name if name in tables else rename(name)) is not None}

    def changes(self, skeleton: Skeleton, kept: Sequence[int]) -> dict[str, Any]:
        """Return the values of config.json for a model with these layers alone."""
        values = skeleton.effective
        numbers = {name: value_of(values, name) for name in self.numbered}
        changes: dict[str, Any] = {self.key: len(kept)}
        if self.period is not None:
            period, exceptions = self.period
            step, listed = value_of(values, period), value_of(values, exceptions)
            numbers[exceptions] = [n for n in range(self.depth) if (n + 1) % step or n in listed]
            changes[period] = 1
        changes |= {name: [value_of(values, name)[number] for number in kept] for name in self.lists}
        changes |= {name: [kept.index(n) for n in own if n in kept] for name, own in numbers.items()}
        changes |= {name: sum(n < value_of(values, name) for n in kept) for name in self.first}
        changes |= {name: sum(n >= self.depth - value_of(values, name) for n in kept) for name in self.last}
        for name in self.by_number:
            held = {int(number): value for number, value in value_of(values, name).items()}
            changes[name] = {str(new): held[old] for new, old in enumerate(kept) if old in held}
        return changes


@dataclass(frozen=True)
class UnitKeys:
    """Tensors that change with the keys of a size.

    Attributes:
        keys: of config.json -> how much one unit counts there.
        held: units that there are.
        carriers: name of a tensor in files -> where they may lie in it: shapes do not always tell.
        stated: other keys that config.json has to state, and their values.
        scaled: keys of sizes that a unit has as large a part of, in a model with fewer units of the same width: no
            config says that of a model whose other parts are as they were.
        least: units that each axis has to keep where they keep different numbers.
        biased: whether layers share a table of biases with a column for every head, which keeps all of them.
    """

    keys: Mapping[str, int]
    held: int
    carriers: Mapping[str, tuple[Carrier, ...]]
    stated: Changes = field(default_factory=dict)
    scaled: Mapping[str, int] = field(default_factory=dict)
    least: int = 0
    biased: bool = False

    @property
    def layouts(self) -> list[dict[str, Carrier]]:
        """The carriers by each of the layouts that shapes allow."""
        most = max(map(len, self.carriers.values()))
        return [
            {name: own[min(number, len(own) - 1)] for name, own in self.carriers.items()}
            for number in range(most)
        ]

    def changes(self, kept: int) -> dict[str, Any]:
        """Return the values of config.json for a model with `kept` units."""
        return {**{key: each * kept for key, each in self.keys.items()}, **self.stated}

    def donor(self, kept: int) -> dict[str, Any]:
        """Return the values of a config for `kept` units, whatever the other sizes are."""
        return {**self.changes(kept), **{key: each * kept for key, each in self.scaled.items()}}


def numbers(values: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, int]]:
    """Key and whole number of a config, and of the configs within it that are for text; of even lists their number."""
    for key, value in values.items():
        if isinstance(value, Mapping) and "model_type" in value and not OTHER_SENSES.search(key):
            yield from numbers(value, f"{within}{key}.")
        elif type(value) is int:
            yield f"{within}{key}", value
        elif isinstance(value, list) and value and all(type(one) is int and one == value[0] for one in value):
            yield f"{within}{key}", value[0]


def outputs(carriers: Mapping[str, Carrier]) -> list[str]:
    """Names of the weights that mix heads or hidden units: units are the inputs of these linear layers."""
    # Some families store stacked experts as [in, out], others as [out, in].
    if any(carrier.dim > 1 for carrier in carriers.values()):
        return [name for name in carriers if MIXES.search(name)]
    biased = {module_of(name) for name in carriers if name.endswith(".bias")}
    weights = [
        name
        for name in without_tables(carriers)
        if name.endswith(".weight") and module_of(name) not in biased
    ]
    return [name for name in weights if carriers[name].dim == 1] or weights


def without_tables(carriers: Mapping[str, Carrier]) -> dict[str, Carrier]:
    """The carriers but those that are tables with a column for each head: of biases by position."""
    return {name: carrier for name, carrier in carriers.items() if not _TABLE.search(name)}


def owners(carriers: Mapping[str, Carrier]) -> dict[str, str]:
    """Name of a tensor of heads -> its attention: the module around an output and what is computed for it."""
    mixing = outputs(carriers)
    inputs = [name for name in carriers if name not in mixing]
    around = set()
    for name in mixing:
        owner = name
        while owner and not any(other.startswith(f"{owner}.") for other in inputs):
            owner = module_of(owner)
        around.add(owner)
    return {
        name: max((owner for owner in around if name.startswith(f"{owner}.")), key=len, default="")
        for name in carriers
    }


def common_owner(names: Iterable[str]) -> str:
    """The module that holds all the modules of these tensors; "" where the model itself does."""
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(column[0] for column in takewhile(lambda column: len({*column}) == 1, columns))


def unit_owner(name: str) -> str:
    """Return the owner of a tensor of hidden units: an expert, a layer's experts or shared experts, or the layer."""
    pattern = r".*?shared\w*(?=\.)" if "shared" in name else r".*?experts(\.(expert_)?\d+)?(?=\.)"
    match = re.match(pattern, name)
    return match[0] if match else layer_of(name)


def is_of_experts(carriers: Mapping[str, Carrier]) -> bool:
    """Whether some of these hidden units are those of experts."""
    return any("expert" in name or carrier.dim > 1 for name, carrier in carriers.items())


def template_of(name: str) -> str:
    """The name of a tensor without the numbers of its layer and its expert."""
    return re.sub(r"(?<=[._])\d+(?=\.)", "{}", name)


def layer_keys(skeleton: Skeleton) -> list[LayerKey]:
    """The stacks of layers whose depth a key says."""
    depths = _depths(skeleton.stored)
    found: list[LayerKey] = []
    values = skeleton.effective
    # Where no number says how many layers there are, a list with an entry for each may.
    names = () if "num_hidden_layers" in values else _LISTS
    lists = ((key, len(values[key])) for key in names if isinstance(values.get(key), list))
    for key, depth in (*lists, *numbers(values)):
        if depth not in depths.values() or any(one.key in one.lists and depth == one.depth for one in found):
            continue
        rules = _layer_rules(skeleton, key, depth)
        if depth == 1:
            found += _only_layer(skeleton, rules)
            continue
        # The last goes, or the first: a class may need layers of each kind.
        tried = product(dict.fromkeys((rules, replace(rules, lists=()))), (range(depth - 1), range(1, depth)))
        stacks = (_confirmed(skeleton, made, kept) for made, kept in tried)
        if (stack := next(filter(None, stacks), None)) is not None:
            found.append(stack)
    return found


def _confirmed(skeleton: Skeleton, rules: LayerKey, kept: Sequence[int]) -> LayerKey | None:
    """The stack under these keys, if a model that keeps so many of its layers lacks the others' tensors alone."""
    other = skeleton.changed(rules.changes(skeleton, kept))
    if other is None:
        return None
    depth = rules.depth
    modules = _shorter(skeleton.shapes, other.shapes, depth)
    prefixes = _shorter(skeleton.stored, other.stored, depth)
    made = replace(rules, prefixes=prefixes, modules=modules, tables=_tables(skeleton.stored, prefixes))
    if not modules or not prefixes or {*made.renamed(skeleton.stored, kept)} != {*other.stored}:
        return None
    within = tuple(f"{prefix}." for prefix in prefixes)
    outside = {name: shape for name, shape in skeleton.stored.items() if not name.startswith(within)}
    moved = _moves(outside, other.stored)
    shares = {
        name: Carrier(dim)
        for name, (dim, before, after) in moved.items()
        if before * (depth - 1) == after * depth
    }
    return replace(made, shares=shares, samples=_samples(skeleton, made))


def _tables(names: Iterable[str], prefixes: Iterable[str]) -> tuple[str, ...]:
    """See `LayerKey`."""
    for prefix in prefixes:
        first, *others = map(set, by_layer(names, prefix).values())
        if others and all(own <= first for own in others) and len({*map(len, others)}) == 1:
            return tuple(first.difference(*others))
    return ()


def by_layer(names: Iterable[str], prefix: str) -> dict[int, dict[str, str]]:
    """Number of each layer of a stack -> name of a tensor within the layer -> its name."""
    start = re.compile(rf"{re.escape(prefix)}\.(\d+)\.")
    found: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for name in names:
        if match := start.match(name):
            found[int(match[1])][name[match.end() :]] = name
    return {number: found[number] for number in sorted(found)}


def _samples(skeleton: Skeleton, stack: LayerKey) -> tuple[int, ...]:
    """The layers that a small copy has of a stack; layers differ in their tensors, or in what lists say of them."""
    kinds: list[list[object]] = [[] for _ in range(stack.depth)]
    for prefix in stack.prefixes:
        for number, names in by_layer(skeleton.stored, prefix).items():
            kinds[number] += [(own, skeleton.stored[name]) for own, name in names.items()]
    for name in stack.lists:
        for kind, value in zip(kinds, value_of(skeleton.effective, name), strict=True):
            kind += [value] if isinstance(value, str) else []
    texts = [*map(str, kinds)]
    ends = {*range(stack.depth)[:2], *range(stack.depth)[-2:]}
    return tuple(sorted(ends | {texts.index(kind) for kind in texts}))


def _only_layer(skeleton: Skeleton, rules: LayerKey) -> list[LayerKey]:
    """The stack that gets a second layer like its only one."""
    other = skeleton.changed(rules.changes(skeleton, (0, 0)))
    if other is None:
        return []
    modules = _shorter(other.shapes, skeleton.shapes, 2)
    prefixes = _shorter(other.stored, skeleton.stored, 2)
    made = replace(rules, prefixes=prefixes, modules=modules, samples=(0,))
    return [made] if prefixes and {*made.renamed(other.stored, (0,))} == {*skeleton.stored} else []


def _layer_rules(skeleton: Skeleton, key: str, depth: int) -> LayerKey:
    """The keys beside the depth that say which layers differ from others."""
    before, dot, _ = key.rpartition(".")
    config = value_of(skeleton.effective, before) if dot else skeleton.effective
    lists = {name: value for name, value in config.items() if isinstance(value, list)}
    whole = [name for name, value in lists.items() if len(value) == depth]
    numbered = [
        name
        for name, value in lists.items()
        if name not in whole
        and _NUMBERED.search(name)
        and all(type(number) is int and number < depth for number in value)
    ]
    period, exceptions = PERIOD
    has_period = type(step := config.get(period)) is int and step > 1 and exceptions in numbered
    start = f"{before}{dot}"

    def full(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(f"{start}{name}" for name in names)

    def counts(pattern: re.Pattern[str]) -> tuple[str, ...]:
        stated = {name: value for name, value in config.items() if type(value) is int and value}
        return full(filter(pattern.search, stated))

    own_period = (f"{start}{period}", f"{start}{exceptions}") if has_period else None
    by_number = [
        name
        for name, value in config.items()
        if isinstance(value, Mapping)
        and name != "id2label"
        and value
        and all(str(number).isdecimal() for number in value)
    ]
    return LayerKey(
        key,
        (),
        (),
        depth,
        lists=full(whole),
        numbered=full(numbered),
        first=counts(_FIRST),
        last=counts(_LAST),
        by_number=full(by_number),
        period=own_period,
    )


def width_keys(skeleton: Skeleton, pattern: re.Pattern[str]) -> list[UnitKeys]:
    """The sizes under keys of such names; tensors have each unit once, or several times in blocks.

    Keys of one vocabulary, which say the same size, are also tried together.
    """
    named = (*numbers(skeleton.effective), *_unstated(skeleton, pattern))
    sizes = {key: value for key, value in named if value > 1 and pattern.search(last_part(key))}
    tried = [(dict.fromkeys((key,), 1), value) for key, value in sizes.items()]
    if pattern is VOCABULARY and len({*sizes.values()}) == 1 < len(sizes):
        tried.append((dict.fromkeys(sizes, 1), tried[0][1]))
    return [own for keys, value in tried if (own := _width(skeleton, UnitKeys(keys, value, {})))]


def channel_keys(skeleton: Skeleton) -> Iterator[UnitKeys]:
    """The widths of residual streams; the width of a head is stated where it would follow from them.

    What reads images or sounds writes to the stream too, and a small copy is not given any.
    """
    values = skeleton.effective
    if any(OTHER_SENSES.search(key) for key, value in values.items() if value):
        return
    heads = {count for name, count in head_counts(values).items() if not is_key_value(name)}
    for key, size in numbers(values):
        if last_part(key) in HIDDEN:
            within = outer(key)
            stated = (own for count in heads for own in _head_widths(within, size, count))
            # Twice as many: some classes refuse a size that the heads do not divide.
            tried = (_width(skeleton, UnitKeys({key: 1}, size, {}, own), size) for own in ({}, *stated))
            yield from islice(filter(None, tried), 1)


def _width(skeleton: Skeleton, units: UnitKeys, more: int = 1) -> UnitKeys | None:
    """The units of one size, with carriers; None: what their keys move is not as long as they say.

    Args:
        more: units of a larger model, in which the carriers are longer.
    """
    size, carriers = units.held, {}
    for name, (dim, before, after) in _moved(skeleton, units.changes(size + more)).items():
        blocks = before // size
        if blocks not in (1, 2) or (before, after) != (blocks * size, blocks * (size + more)):
            return None
        carriers[name] = (Carrier(dim, (1,) * blocks), Carrier(dim))[:blocks]
    return replace(units, carriers=carriers) if carriers else None


def head_counts(values: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of heads of a config, of queries or of keys and values, by their keys."""
    return {
        key: value
        for key, value in numbers(values)
        if _HEADS.search(last_part(key)) and not _NO_COUNT.search(last_part(key))
    }


def is_key_value(key: str) -> bool:
    """Whether a key counts heads of keys and values alone."""
    return bool(_KEY_VALUE.search(last_part(key)))


def outer(key: str) -> str:
    """The beginning of a key that names the config that it lies in: "text_config.", or "" at the top."""
    return key[: -len(last_part(key))]


def hidden_beside(values: Mapping[str, Any], key: str) -> int:
    """The hidden size of the config that a key lies in; 0: it states none."""
    sizes = (value_of(values, outer(key) + name) for name in HIDDEN)
    return next((size for size in sizes if type(size) is int), 0)


def shared_keys(counts: Iterable[str], key: str) -> list[str]:
    """The keys that count the heads of keys and values beside the one that counts those of queries."""
    return [one for one in counts if is_key_value(one) and outer(one) == outer(key)]


def head_keys(skeleton: Skeleton) -> list[UnitKeys]:
    """The numbers of heads that a stock config can say; those of key/value heads where several queries share one."""
    counts = head_counts(skeleton.effective)
    found = []
    for key, queries in counts.items():
        if queries < 2 or is_key_value(key):
            continue
        for pair in (*shared_keys(counts, key), None):
            held = queries if pair is None else counts[pair]
            if held < 2 or queries % held:
                continue
            keys = {key: queries // held} if pair is None else {key: queries // held, pair: 1}
            heads = (_heads(skeleton, keys, held, left) for left in dict.fromkeys((held // 2, held - 1)))
            if (one := next(filter(None, heads), None)) is not None:
                found.append(with_scaled(one, skeleton))
                break
    return found


def with_scaled(units: UnitKeys, skeleton: Skeleton) -> UnitKeys:
    """Heads, with the sizes of a model that has fewer of the same width; as they are where they do not divide these.

    Heads of a state-space part beside the attention stay: other sizes follow from their number.
    """
    within, values = outer(next(iter(units.keys))), skeleton.effective
    sizes = {within + name: value_of(values, within + name) for name in (*HIDDEN, "dim")}
    sizes = {name: size for name, size in sizes.items() if type(size) is int}
    if any(size % units.held for size in sizes.values()):
        return units
    scaled = {name: size // units.held for name, size in sizes.items()}
    for name, count in head_counts(values).items():
        if name.startswith(within) and name not in units.keys and scaled and "mamba" not in name:
            scaled[name] = count // units.held if count % units.held == 0 else 1
    return replace(units, scaled=scaled)


def _heads(skeleton: Skeleton, keys: Mapping[str, int], held: int, left: int) -> UnitKeys | None:
    """The heads under these keys, if with `left` of them the tensors lose as large a part of one dimension each."""
    first, each = next(iter(keys.items()))
    within, hidden = outer(first), hidden_beside(skeleton.effective, first)
    for stated in ({}, *_head_widths(within, hidden, each * held)):
        # A class that does not read the key makes the same of it as of none.
        if any(not skeleton.reads(key, width + 1) for key, width in stated.items()):
            continue
        made = UnitKeys(keys, held, {}, stated)
        moved = _moved(skeleton, made.changes(left))
        if moved and all(b % held == 0 and a * held == b * left for _, b, a in moved.values()):
            outputs = [before for dim, before, _ in moved.values() if dim == 1]  # as wide as all queries
            fused = (
                {(each + 2) * outputs[0] // each: (each, 1, 1), 2 * outputs[0] // each: (1, 1)}
                if outputs
                else {}
            )
            carriers = {
                name: (*([Carrier(dim, fused[before])] if before in fused and dim == 0 else []), Carrier(dim))
                for name, (dim, before, _) in moved.items()
            }
            return replace(made, carriers=carriers)
    return None


def _head_widths(within: str, hidden: int, heads: int) -> list[dict[str, int]]:
    """The width of a head under each of the keys that may state it; none where heads do not divide the hidden size."""
    return [] if hidden % heads else [{within + name: hidden // heads} for name in HEAD_WIDTHS]


def _moved(skeleton: Skeleton, changes: Changes) -> dict[str, tuple[int, int, int]]:
    """Name of a tensor -> the one dimension that moves, its length before and after; empty: other things move too."""
    other = skeleton.changed(changes)
    if other is None or other.shapes.keys() != skeleton.shapes.keys() or other.shapes == skeleton.shapes:
        return {}
    moved = _moves(skeleton.shapes, other.shapes)
    stored = other.stored_beside(moved) if moved else {}
    return _moves({name: skeleton.stored.get(name, ()) for name in stored}, stored)


def _moves(before: Mapping[str, Shape], after: Mapping[str, Shape]) -> dict[str, tuple[int, int, int]]:
    moved = {}
    for name, shape in before.items():
        new = after.get(name, ())
        dims = [dim for dim, (one, other) in enumerate(zip(shape, new, strict=False)) if one != other]
        if len(shape) != len(new) or len(dims) > 1:
            return {}
        for dim in dims:
            moved[name] = (dim, shape[dim], new[dim])
    return moved


def _unstated(skeleton: Skeleton, pattern: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """Key that is null, and the size that is meant: four times the hidden one."""
    hidden = next((skeleton.effective[name] for name in HIDDEN if skeleton.effective.get(name)), 0)
    for key in [key for key, value in skeleton.effective.items() if value is None and pattern.search(key)]:
        other = skeleton.changed({key: 4 * hidden})
        if other is not None and other.shapes == skeleton.shapes:
            yield key, 4 * hidden


def _shorter(before: Mapping[str, Shape], after: Mapping[str, Shape], depth: int) -> tuple[str, ...]:
    """The lists of modules of this length that have lost one module."""
    left = _depths(after)
    return tuple(
        name for name, held in _depths(before).items() if held == depth and left.get(name) == depth - 1
    )


def _depths(names: Mapping[str, Shape]) -> dict[str, int]:
    """Name of a list of modules, the outermost -> its length."""
    found: dict[str, set[int]] = {}
    for name in names:
        if match := re.match(r"(.*?)\.(\d+)\.", name):
            found.setdefault(match[1], set()).add(int(match[2]))
    return {prefix: len(seen) for prefix, seen in found.items() if seen == {*range(len(seen))}}


def last_part(key: str) -> str:
    """The key, within the config that it lies in."""
    return key.rpartition(".")[2]
