"""Mixtures with a number of experts of their own in each layer, where a stock class knows one number for all.

A model of the stock class is made for each number, without values, and each layer is taken from that of its own: so
transformers' classes make all there is, and its own rules fill it and store it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prunecli.architectures.records import Mixture


def class_of_counts(stock: Any, mixture: Mixture, counts_of: Callable[[Any], Mapping[str, int]]) -> Any:
    """A subclass of `stock` whose layers have numbers of experts of their own.

    Args:
        stock: a class of transformers.
        mixture: that it is of.
        counts_of: from a model of `stock`, its layers' names -> experts.
    """

    def make(self: Any, config: Any) -> None:
        stock.__init__(self, config)
        counts = counts_of(self)
        for number in sorted(set(counts.values())):
            other = with_count(config, mixture, number)
            donor = stock(other)
            for path in (path for path, count in counts.items() if count == number):
                borrow(self, donor, path, config, other)

    return subclass(stock, __init__=make)


def subclass(stock: Any, **members: Any) -> Any:
    """A subclass of a class of transformers with other members, under the same name."""
    return type(
        stock.__name__, (stock,), {"__module__": stock.__module__, "__doc__": stock.__doc__, **members}
    )


def with_count(config: Any, mixture: Mixture, count: int) -> Any:
    """A copy of a config of transformers that says so many experts, wherever it says a number."""
    changed = copy.deepcopy(config)
    for key in mixture.counts:
        *outer, inner = key.split(".")
        owner = changed
        for part in outer:
            owner = getattr(owner, part)
        if hasattr(owner, inner):
            setattr(owner, inner, count)
    return changed


def borrow(model: Any, donor: Any, path: str, config: Any, other: Any) -> Any:
    """Put a module of `donor`, made of the config `other`, in the place of that of `model`; returns it."""
    configs = dict(zip(map(id, _configs(other)), _configs(config), strict=True))
    borrowed = donor.get_submodule(path)
    for module in borrowed.modules():
        # To the model's own configs, by which it is told later how to run.
        for name, value in [*vars(module).items()]:
            if id(value) in configs:
                setattr(module, name, configs[id(value)])
    model.set_submodule(path, borrowed)
    return borrowed


def _configs(config: Any) -> Iterator[Any]:
    """It, and those within it."""
    yield config
    for name in sorted(config.sub_configs):
        if getattr(config, name, None) is not None:
            yield from _configs(getattr(config, name))
