"""The random model of a small copy: made, opened of tensors, run, and hooks in the place of its parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from prunecli.model.axes import module_of
from prunecli.model.patchwork import fitted
from prunecli.model.skeleton import Skeleton, computed_parameters, quiet
from prunecli.private import model_from_config

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
NEVER = -1e4
"""Score of an expert that is never picked; finite, so that what multiplies it does not spread."""


def random_model(skeleton: Skeleton, dtype: Any) -> Any:
    """The model of a skeleton, its matrices drawn at random and its vectors moved."""
    config = skeleton.config_of(skeleton.config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_from_config(skeleton.model_class, config, attn_implementation="eager", dtype=dtype)
        model = model.to(dtype)  # some classes make parameters of another type
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
    return in_evaluation(model)


def in_evaluation(model: Any) -> Any:
    """The model in evaluation mode, its experts computed one by one, which works for every type of numbers."""
    with suppress(Exception):
        model.set_experts_implementation("eager")
    return model.eval()


def opened(
    skeleton: Skeleton | None,
    tensors: Mapping[str, Tensor],
    fit: Callable[[Any], None] | None = None,
    *,
    surplus: bool = False,
) -> Any:
    """The model that transformers opens of these tensors; with `fit`, of one whose layers differ.

    Args:
        surplus: whether there may be tensors that it does not take.

    Raises:
        ValueError: it refuses the config, or takes other tensors.
    """
    if skeleton is None:
        raise ValueError("transformers refuses the smaller config")
    dtype = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    model_class = skeleton.model_class if fit is None else fitted(skeleton.model_class, fit)
    with quiet():
        model, told = model_class.from_pretrained(
            None,
            config=skeleton.config_of(skeleton.config),
            state_dict=dict(tensors),
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    kinds = ("missing_keys", "mismatched_keys", *(() if surplus else ("unexpected_keys",)))
    computed = computed_parameters(model)
    if odd := [name for kind in kinds for name in told[kind] if name not in computed]:
        raise ValueError(f"its tensors do not fit the smaller config: {odd[0]}")
    return in_evaluation(model.to(dtype))  # some classes make parameters of another type


def run(model: Any, tokens: Tensor, *, use_cache: bool = False) -> Tensor:
    """`[2, 12, vocabulary]`: what a model makes of tokens `[2, 12]`.

    Args:
        use_cache: it reads the last token by itself, with a cache of what it made of the others.

    Raises:
        Exception: of any kind: the class fails.
    """
    if "MultipleChoice" in type(model).__name__:
        tokens = tokens[:, None]
    more = {"use_cache": use_cache} if takes_cache(model) else {}
    given, last = {"input_ids": tokens}, "input_ids"
    if model.main_input_name == "input_features":  # Whisper: spectrograms of one length
        size = model.config.num_mel_bins, 2 * model.config.max_source_positions
        noise = torch.randn(2, *size, generator=torch.Generator().manual_seed(4))
        given = {"input_features": noise.to(model.dtype)}
    if model.config.is_encoder_decoder:
        last = "decoder_input_ids"
        given[last] = tokens.flip(1)

    def states(tokens: Tensor, **past: Any) -> Any:
        return model(**{**given, last: tokens}, return_dict=True, **more, **past)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several wait for each other longer than they compute
    try:
        with torch.no_grad():
            tokens = given[last]
            if use_cache:
                begun = states(tokens[:, :-1])
                if (past := begun.get("past_key_values")) is not None:
                    ended = states(tokens[:, -1:], past_key_values=past)
                    return torch.cat([begun[0], ended[0]], 1)
            found: Tensor = states(tokens)[0]
    finally:
        torch.set_num_threads(threads)
    return found


def stream_norms(model: Any, places: Container[str]) -> list[Any]:
    """The norms of a model that may be over its residual stream.

    Those without parameters are, but within attentions (DiffLlama's are over heads).

    Args:
        places: names in the model of the parameters that have channels.
    """
    found = []
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            own = [f"{name}.{parameter}" in places for parameter, _ in module.named_parameters()]
            if all(own) if own else not ATTENTION.search(module_of(name)):
                found.append(module)
    return found


@contextmanager
def fold_norms(norms: Iterable[Any], kept: Sequence[int], gone: Sequence[int]) -> Iterator[None]:
    """Inside, norms read the channels `kept` in the place of as many that are `gone` too, and return zeros there."""
    mates = torch.arange(2 * len(kept))
    mates[list(gone)] = torch.tensor(kept)

    def read(_: Any, args: Any) -> Any:
        states, *more = args
        return (states[..., mates], *more) if states.shape[-1] == len(mates) else args

    def fold(_: Any, _args: Any, output: Tensor) -> Tensor:
        is_stream = output.shape[-1] == len(mates)
        return output.index_fill(-1, torch.tensor(gone), 0) if is_stream else output

    with ExitStack() as hooks:
        for norm in norms:
            hooks.enter_context(norm.register_forward_pre_hook(read))
            hooks.enter_context(norm.register_forward_hook(fold))
        yield


def is_linear(module: Any) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear layer, of torch or GPT-2's."""
    return isinstance(module, nn.Linear | Conv1D)


def takes_cache(model: Any) -> bool:
    """Whether a model can be asked to make a cache."""
    taken = inspect.signature(model.forward).parameters.values()
    return any(one.name == "use_cache" or one.kind == one.VAR_KEYWORD for one in taken)


class NeverPicked(TorchFunctionMode):
    """Inside, what a matrix product makes of rows that are NaN is a score that is never picked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("linear", "matmul", "__matmul__", "mm", "addmm", "einsum"):
            return torch.where(found.isnan(), NEVER, found)
        return found


def random_tokens(vocabulary: int) -> Tensor:
    """`[2, 12]`: random tokens, those of the lowest ids left out, which may be special."""
    least = min(8, vocabulary // 4)
    return torch.randint(least, vocabulary, (2, 12), generator=torch.Generator().manual_seed(1))


def given_states(args: Any, kwargs: Any) -> Any:
    """Hidden states that a layer is given."""
    return args[0] if args else kwargs["hidden_states"]


def hand_on(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """Return the hidden states that a layer is given in the place of its own, as its hook; other outputs stay."""
    given = given_states(args, kwargs)
    return type(output)([given, *output[1:]]) if isinstance(output, (tuple, list)) else given
