"""Trials of what was found of a class: its small random copy, cut, has to compute what the same copy does masked."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from itertools import product
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from prunecli.architectures.records import Carrier
from prunecli.model.axes import module_of
from prunecli.model.declared import TIE_KEY
from prunecli.model.patchwork import fit_sizes, pick_bias
from prunecli.model.probe import (
    VOCABULARY,
    WIDTH,
    LayerKey,
    UnitKeys,
    common_owner,
    head_keys,
    layer_keys,
    template_of,
    width_keys,
)
from prunecli.model.skeleton import Changes, Skeleton, stored_form
from prunecli.model.small_copy import TOKENS, smaller_skeletons
from prunecli.model.small_model import (
    NeverPicked,
    fold_norms,
    hand_on,
    is_linear,
    opened,
    random_model,
    random_tokens,
    run,
    stream_norms,
    takes_cache,
)

Method = TypeVar("Method", bound=Callable[..., float])
NEAR = 1e-4
"""Difference of logits over what the units make of them, from which on a cut model is another one than the masked."""
_UNLIKE = 16
_KNOWN: WeakValueDictionary[tuple[Any, Any, str], Trial] = WeakValueDictionary()
"""Class, config class and config, as text -> the small model."""


def _once(method: Method) -> Method:
    """The method of a trial, whose answer for the same arguments is computed once."""

    @wraps(method)
    def ask(trial: Trial, *args: Any, **kwargs: Any) -> float:
        key = method.__name__, repr((args, kwargs))
        if key not in trial.answers:
            trial.answers[key] = method(trial, *args, **kwargs)
        return trial.answers[key]

    return cast("Method", ask)


@dataclass(frozen=True)
class Trial:
    """A small random model.

    Attributes:
        skeleton: its class and config.
        model: with its weights, in evaluation mode, in double precision where the class takes it.
        cached: whether it answers with a cache of keys and values too, through which alone some classes share them.
    """

    skeleton: Skeleton
    model: Any
    cached: bool

    @classmethod
    def of(cls, skeleton: Skeleton, layers: Sequence[LayerKey], *, whole: bool = False) -> Trial:
        """The smallest one of this config that answers.

        Args:
            layers: of the model.
            whole: whether it has all layers; else some of each stack.

        Raises:
            ValueError: every config of smaller sizes makes a large model, or none at all.
            Exception: of any kind: why the class cannot run the last one.
        """
        short = skeleton.explicit
        for stack in () if whole else layers:
            short = short.changed(stack.changes(short, stack.samples)) or short
        failure: Exception = ValueError("no small copy of it can be made")
        for made in smaller_skeletons(short):
            # A model and its result often have the same small copy, whose answers take seconds.
            key = made.model_class, made.config_class, repr(made.config)
            if (known := _KNOWN.get(key)) is not None:
                return known
            for dtype in (torch.float64, torch.float32):
                try:
                    trial = cls(made, random_model(made, dtype), cached=False)
                    # Some classes make the row of the padding token zero on opening.
                    trial = replace(trial, model=opened(made, stored_form(trial.model)))
                    trial.logits(trial.model)
                except Exception as error:  # of any kind: what a class makes of sizes that it does not like
                    failure = error
                    continue
                with suppress(Exception):  # as above
                    with_cache = replace(trial, cached=True)
                    with_cache.logits(trial.model)
                    trial = with_cache
                _KNOWN[key] = trial
                return trial
        raise failure

    @cached_property
    def answers(self) -> dict[tuple[str, str], float]:
        """Method and arguments, as text -> what the method returned; see `_once`."""
        return {}

    @cached_property
    def stacks(self) -> list[LayerKey]:
        """The stacks of layers of the small model."""
        return layer_keys(self.skeleton)

    @cached_property
    def widths(self) -> list[UnitKeys]:
        """The hidden units of the small model."""
        return width_keys(self.skeleton, WIDTH)

    @cached_property
    def tokens(self) -> list[UnitKeys]:
        """The tokens of the small model."""
        return width_keys(self.skeleton, VOCABULARY)

    @cached_property
    def heads(self) -> list[UnitKeys]:
        """The heads of the small model."""
        return head_keys(self.skeleton)

    @cached_property
    def _untied(self) -> Skeleton | None:
        """With a config that ties no embeddings; None: transformers refuses it."""
        return self.skeleton.changed({TIE_KEY: False})

    @cached_property
    def loose(self) -> tuple[str, ...]:
        """Aliases that a config with `tie_word_embeddings` false parts."""
        own = self.skeleton.model.all_tied_weights_keys
        still = own if self._untied is None else self._untied.model.all_tied_weights_keys
        return tuple(self.skeleton.stored_name(name) for name in own if name not in still)

    @cached_property
    def only_unties(self) -> bool:
        """Whether such a config changes nothing else."""
        with suppress(Exception):  # of any kind: transformers opens no such model
            changed = opened(self._untied, stored_form(self.model))
            return bool((self.logits(changed) == self._whole).all())
        return False

    @_once
    def of_channels(self, units: UnitKeys, carriers: Mapping[str, Carrier]) -> float:
        """Compare the model with one of twice as many channels, half of which are zero; see `of_units`.

        A mean over channels would count the zeros. The norms of the wider model therefore read each channel that stays
        twice, the second time in the place of one that goes, and return zeros there.

        Raises:
            Exception: as `of_units`.
        """
        twice = replace(units, held=2 * units.held)
        wide = self.skeleton.changed(twice.changes(twice.held))
        if wide is None:
            raise ValueError("transformers refuses the wider config")
        trial = replace(self, skeleton=wide, model=random_model(wide, self.model.dtype))
        return trial.of_units(twice, carriers, dict.fromkeys(carriers, ""), is_stream=True)

    @_once
    def of_units(
        self,
        units: UnitKeys,
        carriers: Mapping[str, Carrier],
        axes: Mapping[str, str],
        *,
        is_stream: bool = False,
    ) -> float:
        """By how much the model without some units differs from the one whose units are zero; see `NEAR`.

        Args:
            units: of which half go.
            carriers: where they lie.
            axes: name of a tensor -> what its units are one axis of: of each, others go. Empty: they are tokens, which
                are not zeroed: both models answer the same text.
            is_stream: whether they are channels, see `of_channels`.

        Raises:
            Exception: of any kind: transformers opens no such model.
        """
        held, half = units.held, units.held // 2
        if not half:
            raise ValueError("it has one of them alone")
        generator = torch.Generator().manual_seed(2)
        drawn = (torch.randperm(held, generator=generator)[:half].tolist() for _ in range(4 * _UNLIKE))
        by_chance = [*dict.fromkeys(tuple(sorted(places)) for places in drawn)][:_UNLIKE]
        if not axes:
            known = torch.tensor(by_chance[0])
            cut, _ = self._without(held, carriers, dict.fromkeys(carriers, by_chance[0]))
            smaller = opened(self.skeleton.changed(units.changes(half)), cut)
            text = random_tokens(half)
            expected = self.logits(self.model, known[text])
            expected = expected[..., known] if expected.shape[-1] == held else expected
            return self._apart(expected, smaller, text)
        # Of many experts, those whose numbers differ by a multiple of 16 lose the same units.
        numbers = {axis: number % _UNLIKE for number, axis in enumerate(dict.fromkeys(axes.values()))}
        # Groups that are shared by several units may be even by chance, and are not where the first or the last half
        # stays. Of any two axes other units go in one of the rounds by chance: what one uses of the other then shows.
        in_order = tuple(range(half)), tuple(range(half, 2 * half))
        rounds = [{axis: in_order[number % 2] for axis, number in numbers.items()}]
        step = 1
        while step <= max(1, *numbers.values()):
            rounds.append({axis: by_chance[n // step % len(by_chance)] for axis, n in numbers.items()})
            step *= len(by_chance)
        smaller_skeleton = self.skeleton.changed(units.changes(half))
        apart, smaller = 0.0, None
        for number, kept in enumerate(rounds, 1):
            cut, masked = self._without(held, carriers, {name: kept[axes[name]] for name in carriers})
            model = self._masked(masked, carriers)
            places = {self.modules.get(name, "") for name in carriers}
            stays, is_last = next(iter(kept.values())), number == len(rounds)
            gone = sorted({*range(held)}.difference(stays))
            with fold_norms(stream_norms(model, places), stays, gone) if is_stream else nullcontext():
                expected = self.logits(model, cached=is_last)
            smaller = self._filled(smaller, cut, carriers) or opened(smaller_skeleton, cut)
            apart = max(apart, self._apart(expected, smaller, cached=is_last))
        return apart

    def _masked(self, tensors: Mapping[str, Tensor], changed: Iterable[str]) -> Any:
        """The model with these tensors; the next call may change it.

        Args:
            changed: names of those that differ from its own.
        """
        return self._filled(self._spare, tensors, changed) or opened(self.skeleton, tensors)

    @cached_property
    def _spare(self) -> Any:
        """Another model of the skeleton, to be filled."""
        return copy.deepcopy(self.model)

    def _filled(self, model: Any, tensors: Mapping[str, Tensor], changed: Iterable[str]) -> Any:
        """The opened model of an earlier round with these tensors; None: there is none, or files store it otherwise."""
        if model is None or not self.turned.isdisjoint(map(template_of, changed)):
            return None
        own = model.state_dict()
        for name, tensor in tensors.items():
            if template_of(name) not in self.turned:
                own[self.modules[name]].copy_(tensor)
        return model

    @_once
    def of_uneven(
        self, units: UnitKeys, carriers: Mapping[str, Carrier], axes: Mapping[str, str], least: int
    ) -> float:
        """Compare the models if each axis keeps another number of units, at least `least`; see `of_units`.

        With a bias of positions for all heads, each attention picks that of its own.

        Raises:
            Exception: as `of_units`.
        """
        generator = torch.Generator().manual_seed(3)
        kept = {}
        for number, axis in enumerate(dict.fromkeys(axes.values())):
            count = least + number % (units.held - least)
            kept[axis] = sorted(torch.randperm(units.held, generator=generator)[:count].tolist())
        cut, masked = self._without(units.held, carriers, {name: kept[axes[name]] for name in carriers})
        cut = {name: tensor for name, tensor in cut.items() if name not in carriers or kept[axes[name]]}

        def fit(model: Any) -> None:
            for axis, own in kept.items():
                donor = self.skeleton.donor(units.donor(max(len(own), 1)))
                within = {name: carrier for name, carrier in carriers.items() if axes[name] == axis}
                fit_sizes(model, donor, self.modules.__getitem__, within, len(own), units.held)
                if units.biased:
                    attention = common_owner(self.modules[name] for name in within)
                    pick_bias(model.get_submodule(attention), own, units.held)

        expected = self.logits(self._masked(masked, carriers))
        return self._apart(expected, opened(self.skeleton, cut, fit))

    @cached_property
    def turned(self) -> frozenset[str]:
        """Names in files, without numbers, of the tensors that the class holds otherwise: turned, parted or stacked."""
        own, stored = self.model.state_dict(), stored_form(self.model)
        return frozenset(
            template_of(name)
            for name, tensor in stored.items()
            if name not in self.modules or not tensor.equal(own[self.modules[name]])
        )

    @cached_property
    def modules(self) -> dict[str, str]:
        """Name of a tensor in files -> its name in the model."""
        return {self.skeleton.stored_name(name): name for name in self.skeleton.shapes}

    @cached_property
    def linears(self) -> list[str]:
        """Names of the linear layers, in the order in which they ran last."""
        return [name for name in self.flow if is_linear(self.model.get_submodule(name))]

    @cached_property
    def flow(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name of a linear layer or norm -> what it was given and what it returned last, in the order of the model."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def note(name: str, _: Any, given: Any, output: Any) -> None:
            seen.pop(name, None)
            seen[name] = given[0] if given else torch.empty(0), output

        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if is_linear(module) or "norm" in type(module).__name__.lower():
                    hooks.enter_context(module.register_forward_hook(partial(note, name)))
            self.logits(self.model)
        return seen

    def comes_after(self, norm: str, last: str, first: str | None = None) -> bool:
        """Whether a norm is given what a linear layer returns, plus what the linear layer `first` is given.

        With `first`, it is the norm after the residual connection around both.
        """
        if not {norm, last, first or last} <= self.flow.keys():
            return False
        given, end = self.flow[norm][0], self.flow[last][1]
        start = torch.zeros_like(end) if first is None else self.flow[first][0]
        return given.shape == start.shape == end.shape and bool(
            torch.allclose(given.double(), (start + end).double())
        )

    def _without(
        self, held: int, carriers: Mapping[str, Carrier], kept: Mapping[str, Sequence[int]]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors in files without the units that go, and with them as zeros."""
        stored = stored_form(self.model)
        cut, masked = dict(stored), dict(stored)
        for name, carrier in carriers.items():
            tensor = stored[name]
            stays = _rows(tensor, carrier, kept[name], held)
            goes = sorted({*range(tensor.shape[carrier.dim])}.difference(stays.tolist()))
            cut[name] = tensor.index_select(carrier.dim, stays)
            masked[name] = tensor.index_fill(carrier.dim, torch.tensor(goes, dtype=torch.long), 0)
        return cut, masked

    @_once
    def of_layers(self, stack: LayerKey, kept: Sequence[int]) -> float:
        """Compare the model without some layers with the one whose layers hand on their inputs; see `of_units`.

        Raises:
            Exception: as `of_units`.
        """
        stored = stored_form(self.model)
        cut = {new: stored[name] for new, name in stack.renamed(stored, kept).items()}
        for name, carrier in stack.shares.items():
            cut[name] = stored[name].index_select(
                carrier.dim, _rows(stored[name], carrier, kept, stack.depth)
            )
        smaller = opened(self.skeleton.changed(stack.changes(self.skeleton, kept)), cut)
        with ExitStack() as hooks:
            for name, number in product(stack.modules, {*range(stack.depth)}.difference(kept)):
                layer = self.model.get_submodule(name)[number]
                hooks.enter_context(layer.register_forward_hook(hand_on, with_kwargs=True))
            expected = self.logits(self.model)
        return self._apart(expected, smaller)

    def without(
        self,
        outputs: Sequence[str],
        norms: Mapping[str, Sequence[str]],
        after: Sequence[str],
        remove: Callable[[Any, Sequence[str]], None],
    ) -> tuple[list[str], float]:
        """Compare a model without FFNs or attentions with the one whose FFNs or attentions return zero.

        Args:
            outputs: names of the weights and biases of their output layers, which are zero then.
            norms: what norms are called -> names of their tensors.
            after: those that go with the parts because they come after the addition, see `comes_after`.
            remove: takes the parts out of a model, and norms that are called so.

        Returns:
            Those norms, and the others that change nothing then, because they are of the removed parts alone; the
            difference.

        Raises:
            Exception: as `of_units`.
        """
        masked = stored_form(self.model)
        masked |= {name: torch.zeros_like(masked[name]) for name in outputs}
        model = opened(self.skeleton, masked)
        for name in (name for norm in after for name in norms[norm]):
            model.get_submodule(module_of(self.modules[name])).register_forward_hook(
                hand_on, with_kwargs=True
            )
        expected = self.logits(model)
        idle = [*after]
        for norm, names in norms.items():
            if norm in after:
                continue
            parameters = [model.get_parameter(self.modules[name]) for name in names]
            before = [parameter.data for parameter in parameters]
            for parameter in parameters:
                parameter.data = parameter.data + 1
            if bool((self.logits(model) == expected).all()):
                idle.append(norm)
            for parameter, data in zip(parameters, before, strict=True):
                parameter.data = data
        gone = {name for norm in idle for name in norms[norm]}
        kept = {name: tensor for name, tensor in masked.items() if name not in gone}
        found = opened(self.skeleton, kept, lambda model: remove(model, idle), surplus=True)
        return idle, self._apart(expected, found)

    def runs_by_layer(self, stacks: Sequence[LayerKey]) -> bool:
        """Whether the model computes the same if it is run once for each layer, and earlier layers return what they
        returned before: nothing but the output of the last layer of a stack goes on to the next one.

        Args:
            stacks: those of the model, in the order in which they run.
        """
        stored: dict[int, Any] = {}

        def step(
            own: int, current: tuple[int, int], number: int, stock: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if (own, number) < current:
                return stored[own]
            stored[own] = stock(*args, **kwargs)
            raise _Stopped

        modules = [
            (own, number, self.model.get_submodule(stack.modules[0])[number])
            for own, stack in enumerate(stacks)
            for number in range(stack.depth)
        ]
        parts = {id(part): part for _, _, module in modules for part in module.modules()}
        held = Counter(id(value) for part in parts.values() for value in part.parameters(recurse=False))
        # Layers that are not read have no values: none may hold another's, or the one that tells the model's device.
        if id(next(self.model.parameters())) in held or max(held.values(), default=2) > 1:
            return False
        forwards = [module.forward for _, _, module in modules]
        expected = run(self.model, self._text)
        try:
            for current in (*[(own, number) for own, number, _ in modules], (len(stacks), 0)):
                for (own, number, module), stock in zip(modules, forwards, strict=True):
                    module.forward = partial(step, own, current, number, stock)
                with suppress(_Stopped):
                    found = run(self.model, self._text)
            return bool((found == expected).all())
        except Exception:  # of any kind: a layer that wants more than the output of the one before
            return False
        finally:
            for (_, _, module), stock in zip(modules, forwards, strict=True):
                module.forward = stock

    def of_experts(self, changes: Changes, cut: Mapping[str, Tensor], never: Mapping[str, Tensor]) -> float:
        """Compare the model without some experts with the one that never picks them.

        Args:
            changes: to the config, which has fewer.
            cut: the tensors without some.
            never: tensors of the routers, with all experts; rows that are NaN are never picked.

        Raises:
            Exception: as `of_units`.
        """
        smaller = opened(self.skeleton.changed(changes), cut)
        model = self._masked({**stored_form(self.model), **never}, never)
        with NeverPicked():
            expected = self.logits(model)
        return self._apart(expected, smaller)

    def _apart(
        self, expected: Tensor, model: Any, text: Tensor | None = None, *, cached: bool = True
    ) -> float:
        """Largest difference of a model from what is expected, over the largest that the units make.

        Args:
            text: tokens that both read; None: those of `logits`, of which the whole model says `_whole`.
            cached: see `logits`.

        Raises:
            ValueError: they make none, so that nothing can be said.
        """
        found = self.logits(model, text, cached=cached)
        whole = self._whole[: len(expected)] if text is None else 0
        effect = float((whole - expected).abs().max())
        if effect == 0:
            raise ValueError("the model says the same without them")
        return float((expected - found).abs().max()) / effect

    @cached_property
    def _whole(self) -> Tensor:
        """Logits of the whole small model."""
        return self.logits(self.model)

    @cached_property
    def _text(self) -> Tensor:
        """`[2, 12]`: random tokens of the whole small model."""
        vocabulary = TOKENS
        with suppress(Exception):  # some have no table, or several
            vocabulary = min(vocabulary, self.model.get_input_embeddings().weight.shape[0])
        tokens = random_tokens(vocabulary)
        end = getattr(self.model.config, "eos_token_id", None)
        if self.model.config.is_encoder_decoder and type(end) is int:
            tokens[:, -1] = end  # where classifiers look
        return tokens

    def logits(self, model: Any, tokens: Tensor | None = None, *, cached: bool = True) -> Tensor:
        """`[2 or 4, 12, vocabulary]`: what a model says of random tokens, or of these, without and with a cache.

        With a cache it reads the last token by itself, as it does when it generates.

        Args:
            cached: whether it is asked with a cache too, if the class can be.

        Raises:
            ValueError: no finite numbers.
            Exception: of any kind: the class fails.
        """
        tokens = self._text if tokens is None else tokens
        found = run(model, tokens)
        if cached and self.cached and takes_cache(model):
            found = torch.cat([found, run(model, tokens, use_cache=True)])
        if not bool(torch.isfinite(found).all()):
            raise ValueError("logits are not finite")
        return found


class _Stopped(BaseException):
    """Ends a pass after a layer; not an Exception, so that no model code catches it."""


def _rows(tensor: Tensor, carrier: Carrier, places: Sequence[int], held: int) -> Tensor:
    """Indices of the units at `places`, of `held`, on the dimension of a tensor where they lie."""
    ranges = carrier.ranges(places, tensor.shape[carrier.dim], held)
    return torch.cat([torch.arange(*each) for each in ((0, 0), *ranges)])
