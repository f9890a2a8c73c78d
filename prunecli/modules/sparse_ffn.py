"""The sparse FFN of mixture-of-experts transformers: a router and the top k of N expert FFNs (2212.09811, eq. 1-2)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from prunecli.modules.grouped import Dispatch, Weights, are_few, dispatch, run_few
from prunecli.modules.stock_experts import ExpertWeights, combine, outputs_of
from prunecli.private import tensor_version

EXPERT_PARTS = {
    "fc1_weight": "fc1.weight",
    "fc2_weight": "fc2.weight",
    "fc1_bias": "fc1.bias",
    "fc2_bias": "fc2.bias",
}
"""The stacked parameters of a `SparseFFN`, in the order of `ExpertWeights` -> an expert's own tensors."""

MASKED = -1e3  # additive attention masks hold 0 for "may attend" and -1e4 or less for "may not"


FOUND = "prunecli_real_rows"
"""Attribute of an attention mask: what was asked of it, and the rows."""


class Router(nn.Linear):
    """W_g of eq. 1: logits in float32 whatever the dtype of the model; casting the model leaves it in float32."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == torch.float32 else tensor.to(moved.device, torch.float32)

        super()._apply(keep_float32, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """Map `[tokens, d_model]` of any dtype to float32 logits `[tokens, num_experts]`."""
        with torch.autocast(tokens.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return functional.linear(tokens.float(), self.weight.float(), bias)


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the top k experts of each token.

    The first is the argmax of the gates, the next ones that of the remaining logits; ties go to the lowest index.

    Args:
        logits: `[tokens, num_experts]` float32.
        top_k: how many experts to choose.

    Returns:
        gates `[tokens, num_experts]` float32, G = softmax(W_g x) over all experts (eq. 1), before renormalisation;
        experts `[tokens, top_k]` int64, the chosen ones, ranked; weights `[tokens, top_k]` float32, the chosen gates
        divided by their sum (eq. 2).
    """
    gates = torch.softmax(logits, dim=-1)
    choices = [gates.argmax(dim=-1, keepdim=True)]
    remaining = logits.detach()
    for _ in range(top_k - 1):
        remaining = remaining.scatter(1, choices[-1], -torch.inf)
        choices.append(remaining.argmax(dim=-1, keepdim=True))
    experts = torch.cat(choices, dim=1)
    chosen = gates.gather(1, experts)
    total = chosen.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps)
    return gates, experts, chosen / total


def real_rows(padding_mask: Tensor | None, batch: int, seq: int) -> Tensor | None:
    """Find the tokens that are not padding, once for all layers that are given one mask: to find them waits for a GPU.

    Args:
        padding_mask: None; or `[batch, keys]`, nonzero = real; or an attention mask `[batch, heads, queries, keys]`,
            boolean (True = may attend) or additive (large negatives = may not), of which the last query decides.
            Where there are more keys than tokens, the tokens are the last keys.
        batch: number of sequences.
        seq: tokens per sequence.

    Returns:
        Indices of the real tokens in the flattened `[batch * seq]`, or None where all are real.
    """
    if padding_mask is None:
        return None
    version = None if padding_mask.is_inference() else tensor_version(padding_mask)
    is_of_pass = padding_mask.dim() == 4 and padding_mask.is_cuda
    asked, found = getattr(padding_mask, FOUND, (None, None))
    if not is_of_pass or asked != (version, batch, seq):
        rows = real_tokens(padding_mask, batch, seq).nonzero().squeeze(1)
        found = None if rows.numel() == batch * seq else rows
        setattr(padding_mask, FOUND, ((version, batch, seq), found))
    return found


def real_tokens(padding_mask: Tensor, batch: int, seq: int) -> Tensor:
    """Which tokens are not padding: `[batch * seq]` bool. Arguments are those of `real_rows`."""
    last = padding_mask if padding_mask.dim() == 2 else padding_mask[:, 0, -1]
    last = last[:, -seq:]
    additive = padding_mask.dim() == 4 and last.is_floating_point()
    real = (last > MASKED) if additive else last.bool()
    return real.expand(batch, seq).reshape(-1)


class SparseFFN(nn.Module):
    """y_t = sum_{E in top k} G_tE E(x_t) / sum_{E in top k} G_tE, with E(x) = act(x W1 + b1) W2 + b2 (eq. 2).

    No expert has a capacity: every real token is served by its top k. Padding is neither routed nor computed, but for
    single steps of decoding on a GPU.

    Args:
        d_model: width of the hidden states.
        ffn_dim: inner width of each expert.
        num_experts: N, at least `top_k`.
        top_k: experts per token.
        activation: a name of transformers' activation table.
        router_bias: whether the router has a bias.
        token_dropout: p: expert outputs are dropped with this probability in training, scaled by 1 - p otherwise.
        activation_dropout: dropout after the activation, in training.

    Attributes:
        observer: called once per forward pass with the gates and the experts of the real tokens, see `route`.
        runner: computes the experts' outputs where their weights are not held here, or None: (rows
            `[assignments, d_model]` sorted by expert, their `Dispatch`) -> `[assignments, d_model]`.
    """

    has_gate, has_bias, is_transposed, has_post_expert_norm = False, True, False, False

    def __init__(
        self,
        d_model: int,
        ffn_dim: int,
        num_experts: int,
        *,
        top_k: int = 2,
        activation: str = "relu",
        router_bias: bool = False,
        token_dropout: float = 0.0,
        activation_dropout: float = 0.0,
    ) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        self.d_model, self.ffn_dim, self.num_experts, self.top_k = d_model, ffn_dim, num_experts, top_k
        self.token_dropout, self.activation_dropout = token_dropout, activation_dropout
        self.activation = ACT2FN[activation]
        router = Router(d_model, num_experts, bias=router_bias, dtype=torch.float32)
        self.router = nn.ModuleDict({"classifier": router})  # as the stock class names it
        self.fc1_weight = nn.Parameter(torch.empty(num_experts, ffn_dim, d_model))
        self.fc1_bias = nn.Parameter(torch.empty(num_experts, ffn_dim))
        self.fc2_weight = nn.Parameter(torch.empty(num_experts, d_model, ffn_dim))
        self.fc2_bias = nn.Parameter(torch.empty(num_experts, d_model))
        self.observer: Callable[[Tensor, Tensor], None] | None = None
        self.runner: Callable[[Tensor, Dispatch], Tensor] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the parameters as `nn.Linear` does: uniform in ±1/sqrt(in)."""
        self.router["classifier"].reset_parameters()  # type: ignore[operator]
        for weight, bias in ((self.fc1_weight, self.fc1_bias), (self.fc2_weight, self.fc2_bias)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Route and compute the real tokens.

        Args:
            hidden_states: `[batch, seq, d_model]`.
            padding_mask: as in `real_rows`.

        Returns:
            `[batch, seq, d_model]` in the dtype of the input; zero for padding.
        """
        batch, seq, d_model = hidden_states.shape
        flat = hidden_states.reshape(-1, d_model)
        needs_graph = torch.is_grad_enabled() and (
            flat.requires_grad or any(parameter.requires_grad for parameter in self.parameters())
        )
        is_plain = self.observer is None and self.runner is None and not needs_graph
        # To find the real ones of a step's few tokens would wait for a GPU.
        computes_padding = flat.is_cuda and seq == 1 and is_plain
        rows = None if computes_padding else real_rows(padding_mask, batch, seq)
        tokens = flat if rows is None else flat[rows]
        gates, experts, weights = route(self.router["classifier"](tokens), self.top_k)
        if self.observer is not None:
            self.observer(gates.detach(), experts)
        mixed = self._mix(tokens, experts, weights, needs_graph).to(hidden_states.dtype)
        if rows is not None:
            mixed = torch.zeros_like(flat).index_copy(0, rows, mixed)
        elif computes_padding and padding_mask is not None:
            mixed = mixed.where(real_tokens(padding_mask, batch, seq)[:, None], 0)
        return mixed.view(batch, seq, d_model)

    def _stacked(self) -> Weights:
        return self.fc1_weight, self.fc2_weight, self.fc1_bias, self.fc2_bias

    def act_fn(self, hidden: Tensor) -> Tensor:
        """The activation, and the dropout behind it."""
        activated: Tensor = self.activation(hidden)
        return functional.dropout(activated, self.activation_dropout, self.training)

    def _outputs(self, rows: Tensor, plan: Dispatch) -> Tensor:
        """Outputs `[assignments, d_model]` of `rows`, sorted by expert."""
        weights = (tensor.to(rows.dtype) for tensor in self._stacked())
        return outputs_of(self, rows, plan, ExpertWeights(*weights))

    def _mix(self, tokens: Tensor, experts: Tensor, weights: Tensor, needs_graph: bool) -> Tensor:
        """Eq. 2 for `tokens` `[tokens, d_model]` with their chosen `experts` and `weights` `[tokens, top_k]`."""
        device_type = tokens.device.type
        dtype = self.fc1_bias.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        tokens = tokens.to(dtype)
        with torch.autocast(device_type, enabled=False):
            if self.runner is None and not needs_graph and are_few(tokens, self.top_k, self.fc1_weight):
                outputs = run_few(tokens, experts, self._stacked(), self.act_fn)
                position = torch.arange(len(outputs), device=outputs.device).view_as(experts)
                return self._combine(outputs, weights, position)
            plan = dispatch(experts, self.num_experts)
            rows = tokens.index_select(0, plan.source)
            outputs = (self.runner or self._outputs)(rows, plan)
            return self._combine(outputs, weights, plan.position)

    def _combine(self, outputs: Tensor, weights: Tensor, position: Tensor) -> Tensor:
        """Sum `outputs` `[assignments, d_model]` at each token's `position` `[tokens, top_k]` under its weights."""
        if self.token_dropout and self.training:
            outputs = functional.dropout(outputs, self.token_dropout)
        elif self.token_dropout:
            weights = weights * (1 - self.token_dropout)
        return combine(outputs, weights, position)
