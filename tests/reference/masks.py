"""|dL/dxi| for masks xi that are tensors in the graph (1905.10650, eq. 2, for units of any kind), slowly."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def mask_gradients(
    model: nn.Module,
    loss: Callable[[Callable[..., Any]], Tensor],
    inputs: Mapping[str, tuple[str, tuple[int, ...]]],
    layers: Mapping[str, Sequence[str]],
    experts: Mapping[str, str],
) -> dict[str, Tensor]:
    """Name -> dL/dxi at xi = 1, `[units]`, of inputs perhaps `[tokens, units]`.

    Args:
        loss: from a function that runs the model to the loss of one example.
        inputs: name -> module whose inputs are those of units side by side, and the shape of xi, which multiplies each.
        layers: name -> modules of a stack; xi multiplies what a layer adds to its input.
        experts: name -> parameter with the output weights of all experts, of which xi multiplies each.
    """
    masks = {name: torch.ones(shape, requires_grad=True) for name, (_, shape) in inputs.items()}
    masks |= {name: torch.ones(len(own), requires_grad=True) for name, own in layers.items()}
    parameters = dict(model.named_parameters())
    masks |= {name: torch.ones(len(parameters[own]), requires_grad=True) for name, own in experts.items()}
    with ExitStack() as hooks:
        for name, (module, shape) in inputs.items():

            def multiply(_: Any, given: Any, name: str = name, units: int = shape[-1]) -> Any:
                wide = masks[name].repeat_interleave(given[0].shape[-1] // units, dim=-1)
                return (given[0] * wide, *given[1:])

            hooks.callback(model.get_submodule(module).register_forward_pre_hook(multiply).remove)
        for name, modules in layers.items():
            for number, module in enumerate(modules):

                def mix(
                    _: Any, given: Any, options: Any, made: Any, name: str = name, number: int = number
                ) -> Any:
                    before = given[0] if given else options["hidden_states"]
                    after = made[0] if isinstance(made, tuple) else made
                    mixed = before + masks[name][number] * (after - before)
                    return (mixed, *made[1:]) if isinstance(made, tuple) else mixed

                handle = model.get_submodule(module).register_forward_hook(mix, with_kwargs=True)
                hooks.callback(handle.remove)
        scaled = {
            own: parameters[own] * masks[name].view(-1, *[1] * (parameters[own].dim() - 1))
            for name, own in experts.items()
        }
        value = loss(lambda **rows: functional_call(model, scaled, kwargs=rows))
        found = torch.autograd.grad(value, [*masks.values()], allow_unused=True)
    return {
        name: torch.zeros_like(mask) if own is None else own
        for (name, mask), own in zip(masks.items(), found, strict=True)
    }


def expert_mask_squares(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], modules: Sequence[str]
) -> list[Tensor]:
    """For each module of gated experts `[experts, units]` of sums over tokens of (dL/dxi)^2.

    A mask xi multiplies one unit's activation for one token.

    Args:
        loss: from the model to the loss of one example of several tokens.
        modules: names of modules with a stacked `down_proj`, of a model whose implementation is "eager".
    """
    masks = []

    def run(module: Any, given: tuple[Tensor, ...], _: Tensor) -> Tensor | None:
        if len(given[0]) == 1:  # asked below
            return None
        mask = torch.ones(len(given[0]), *module.down_proj.shape[::2], requires_grad=True)
        masks.append(mask)
        found = []
        for own, *token in zip(mask, *(rows.split(1) for rows in given), strict=True):
            found.append(functional_call(module, {"down_proj": module.down_proj * own[:, None]}, (*token,)))
        return torch.cat(found)

    with ExitStack() as hooks:
        for name in modules:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(run))
        found = torch.autograd.grad(loss(model), masks)
    return [own.square().sum(dim=0) for own in found]


@contextmanager
def masking(weight: Tensor, mask: Sequence[float], axis: int) -> Iterator[None]:
    """Within the block the parts of an output projection that belong to heads are multiplied by their mask."""
    before = weight.detach().clone()
    with torch.no_grad():
        for part, value in zip(weight.chunk(len(mask), axis), mask, strict=True):
            part.mul_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


@contextmanager
def passed_by(model: nn.Module, modules: Iterable[str], outputs: Iterable[str] = ()) -> Iterator[None]:
    """Within the block these layers or norms change nothing, and what these linear layers end adds nothing."""
    with ExitStack() as hooks:
        for name in outputs:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(lambda _, __, made: torch.zeros_like(made)))
        for name in modules:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_hook(_hand_on, with_kwargs=True))
        yield


def _hand_on(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Input of a layer, and what it returns beside its output (T5's biases of positions)."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return type(output)([hidden, *output[1:]]) if isinstance(output, (tuple, list)) else hidden
