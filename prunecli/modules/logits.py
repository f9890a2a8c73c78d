"""A model's logits a block of positions at a time, so that those of a whole batch never exist together.

What is below the head runs once, in the model's own forward pass. For each further block that forward pass is begun
anew, and what is below the head answers with what it returned before, cut to the block. So nothing of a head is
restated: scales, soft caps, biases and the layers of a masked language model's head are the model's own. Where a
class's head does not take the last hidden states of what is below it, the logits are taken whole.

The same way leads from last hidden states to logits when the rest of the model is gone: `Logits.of_states`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from prunecli.modules.hooks import replaced
from prunecli.private import pytree

BLOCK_VALUES = 1 << 25
"""Logits that are computed at a time: 128 MiB in float32, 256 positions of a vocabulary of 128k."""


def block_positions(vocabulary: int) -> int:
    """Positions whose logits are computed at a time."""
    return max(1, BLOCK_VALUES // vocabulary)


class Logits:
    """The logits of some positions of one batch.

    Args:
        model: with a head; may be wrapped for several processes.
        inputs: arguments of its forward pass, without labels, on its device.
        kept: `[B, T]` bool, or `[B]` in classification: the positions that are wanted.
        in_blocks: False: all logits together, in one forward pass of the model.
        by_states: the last hidden states are wanted too, so that the head runs by itself also where one block is all.

    Attributes:
        model: not wrapped.
        outputs: what else the forward pass returned.
        has_states: whether the head takes last hidden states, each by itself; only known with `by_states`.
    """

    def __init__(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        kept: Tensor,
        *,
        by_states: bool = False,
        in_blocks: bool = True,
    ) -> None:
        self.model, self._inputs = getattr(model, "module", model), inputs
        self._shape = tuple(kept.shape)
        self._outputs: dict[nn.Module, Any] = {}
        self._hidden, self._cuts, self._is_inside = torch.empty(0), 0, False
        # If the model does not say its vocabulary, nothing is cut.
        vocabulary = vocabulary_size(getattr(self.model, "config", None)) or 1
        size = block_positions(vocabulary) if in_blocks else max(1, kept.numel())
        rows = kept.flatten().nonzero().squeeze(1)
        self._blocks: Sequence[Tensor] = torch.split(rows, size)
        made = self._first(model) if kept.dim() > 1 and (by_states or kept.numel() > size) else None
        self.has_states = made is not None and self._cuts == 1
        if made is None:
            made = model(**inputs)
        # Perceiver predicts at all of its positions, behind those of the batch too.
        logits = made.logits if self.has_states or kept.dim() < 2 else made.logits[:, : self._shape[1]]
        self._held: Tensor | None = logits.flatten(0, -2)
        # The logits are let go once they are used.
        self.outputs = SimpleNamespace(
            **{name: value for name, value in vars(made).items() if name != "logits"}
        )

    def _first(self, model: Any) -> Any:
        """The first forward pass: its logits are those of the first block, `[1, positions, vocabulary]`.

        They are those of all positions if the head does not take last hidden states. None if the head does not take
        each of these by itself.
        """
        rows = self._blocks[0]
        try:
            output = self._run_on(lambda hidden: hidden.index_select(0, rows.to(hidden.device)), model)
        except Exception:
            if not self._cuts:
                raise
            return None
        is_cut = self._cuts == 1 and tuple(output.logits.shape[:-1]) == (1, len(rows))
        return output if is_cut or not self._cuts else None

    def block(self, number: int) -> Tensor:
        """`[positions, vocabulary]`: the logits of one block, the first of them once."""
        rows = self._blocks[number]
        if not self.has_states:
            assert self._held is not None
            return self._held if len(rows) == len(self._held) else self._held.index_select(0, rows)
        if self._held is not None and number == 0:
            first, self._held = self._held, None
            return first
        return self.of_states(self._states_of(rows))

    @property
    def states(self) -> Tensor:
        """`[positions, d_model]`: the last hidden states of all positions that are wanted; only with `has_states`."""
        return torch.cat([self._states_of(rows) for rows in self._blocks])

    def _states_of(self, rows: Tensor) -> Tensor:
        return self._hidden.index_select(0, rows.to(self._hidden.device))

    def of_states(self, states: Tensor) -> Tensor:
        """`[positions, vocabulary]`: the head's logits of any batch's last hidden states `[positions, d_model]`."""
        logits: Tensor = self._run_on(lambda _hidden: states, self.model).logits[0]
        return logits

    def keep_head(self) -> None:
        """Let go of the model's weights that `of_states` has no use for; the model is good for nothing else then."""
        with torch.no_grad(), _Used() as used:
            self.of_states(self._states_of(self._blocks[0][:1]))
        for parameter in self.model.parameters():
            if id(parameter) not in used.seen:
                parameter.data = parameter.data.new_empty(0)

    def each(self, function: Callable[[int, slice], Tensor]) -> list[Tensor]:
        """Return the results of `function` for the number of each block and its place among the positions.

        Where gradients are asked for, what it computes is kept for the first block alone; for the others it is
        computed again on the way back.
        """
        results, end = [], 0
        for number, rows in enumerate(self._blocks):
            positions = slice(end, end := end + len(rows))
            again = number > 0 and self.has_states and torch.is_grad_enabled()
            results.append(
                checkpoint(function, number, positions, use_reentrant=False)
                if again
                else function(number, positions)
            )
        return results

    def _run_on(self, choose: Callable[[Tensor], Tensor], model: Any) -> Any:
        """A forward pass whose head takes what `choose` makes of the last hidden states `[B * T, d_model]`."""
        parts = _parts(self.model)
        with replaced({part: part for part in parts}, partial(self._answer, parts, choose)):
            return model(**self._inputs)

    def _answer(
        self,
        parts: Mapping[nn.Module, bool],
        choose: Callable[[Tensor], Tensor],
        part: nn.Module,
        forward: Any,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Return the output of `part` in the first pass; for the last of `parts` with the chosen last hidden states."""
        if self._is_inside:  # a part of a part
            return forward(*arguments, **options)
        if part not in self._outputs:
            self._is_inside = True
            try:
                output = forward(*arguments, **options)
            finally:
                self._is_inside = False
            if not isinstance(output, Mapping):  # ModernBERT calls its output layer a decoder
                return output
            self._outputs[part] = output
        output = self._outputs[part]
        hidden = output.get("last_hidden_state") if parts[part] else None
        if hidden is None or tuple(hidden.shape[:-1]) != self._shape:
            return output
        self._cuts += 1
        self._hidden = hidden.flatten(0, 1)
        return type(output)(**{**output, "last_hidden_state": choose(self._hidden)[None]})


def vocabulary_size(config: Any, *, output: bool = False) -> int | None:
    """Rows of the table of the tokens that the model of `config` reads, or None where it does not say.

    Args:
        output: of the tokens that it writes, which may be others in Marian and FSMT.
    """
    value = getattr(config, "decoder_vocab_size" if output else "src_vocab_size", None)
    value = getattr(config, "vocab_size", None) if value is None else value
    if value is None and hasattr(config, "get_text_config"):  # of text and images
        value = getattr(config.get_text_config(), "vocab_size", None)
    return value if isinstance(value, int) else None


class _Used(TorchFunctionMode):
    """Inside, the parameters that torch's functions are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        leaves = pytree().tree_leaves((arguments, options))
        self.seen |= {id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)}
        return function(*arguments, **(options or {}))


def _parts(model: Any) -> dict[nn.Module, bool]:
    """The modules whose outputs a head may take -> whether it takes the logits' positions from them."""
    parts = {}
    if getattr(model.config, "is_encoder_decoder", False):
        parts[model.get_encoder()] = False
    for part in (getattr(model, "base_model", model), model.get_decoder()):
        if part is not model:
            parts[part] = True
    return parts
