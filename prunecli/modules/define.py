"""The DeFINE unit (1911.12385, section 3 and A.1 to A.2) in place of an embedding table, and its output side.

Map: token -> e in R^n. Expand: N group transformations to R^k, the number of groups halved from layer to layer. Skip:
layers l > 1 read both the previous output and e, each split in g_l parts; part i of e and part i of the output lie
together as the input of group i (3.3, Figure 3). Reduce: a linear layer to R^m.

Where the paper is silent, or says two things:

- Each group has a block of weights of its own, as Figure 2 counts them (n_l k_l / g_l); A.1 writes one for all groups
  of a layer, which `UnitShape.shared_blocks` asks for.
- After every expansion layer comes the exact GELU, after the reduction nothing. F_G itself is linear (A.1); without a
  nonlinearity the whole unit would be a linear map of e, so no better than the projective embedding of the same n.
  As gelu(x) - gelu(-x) = x, two of its units can carry a value unchanged, which the initial weights make use of.
- No normalisation: the rows of a pretrained table differ in length, and the unit has to reproduce that.
- Every expansion layer and the reduction have a bias.
- Without the reduction (Table 8b) the last layer is what is linear at the end: no GELU comes after it.
- In a group's input, its part of e comes first; without mixing, e comes before the whole previous output.
- Residual connections (Table 8a) add the input of each layer after the first to what it gives, after its GELU.
- The shuffle (Table 6a) is a fixed one: the first values of all groups, then the second ones, and so on.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from prunecli.errors import UnsupportedModelError, kind_and_reason
from prunecli.model.axes import module_of
from prunecli.model.define import SKIPPING, GroupLayer, UnitShape
from prunecli.model.embedding import TokenTables
from prunecli.model.patchwork import Names, has_part
from prunecli.model.trial import NEAR, Trial

CHUNK_ROWS = 4096
"""Rows of the table that are expanded at a time."""


class GroupLinear(nn.Module):
    """F_G of A.1: the input split in g parts, each multiplied by its own block, the results one after another.

    The blocks are one tensor `weight` [g, inputs / g, outputs / g], multiplied in one batched product; where all groups
    share one it is [1, inputs / g, outputs / g]. `bias` is [outputs].
    """

    def __init__(self, layer: GroupLayer) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(layer.weight_shape))
        self.bias = nn.Parameter(torch.empty(layer.outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the blocks; the bias is zero."""
        nn.init.normal_(self.weight, std=self.layer.weight_shape[1] ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(self, values: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        groups = self.layer.groups
        if groups == 1:
            return torch.addmm(self.bias, values, self.weight[0])
        parts = values.view(len(values), groups, -1).transpose(0, 1)
        product = torch.baddbmm(self.bias.view(groups, 1, -1), parts, self.weight.expand(groups, -1, -1))
        return product.transpose(0, 1).reshape(len(values), -1)


class DefineEmbedding(nn.Module):
    """Token ids -> rows of width m, as `nn.Embedding` gives them, computed from a table of width n.

    Attributes:
        map: the table [V, n].
        layers: the expansion layers; none where the kind is `projective`.
        reduce: from k to m; None where the last layer makes the m values.
        padding_idx: the token whose row is all zeros, or None.
        scale: what `forward` multiplies the rows by (sqrt(d_model) in NLLB); `rows` does not.
    """

    def __init__(self, shape: UnitShape, *, padding_idx: int | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.shape = shape
        self.num_embeddings, self.embedding_dim = shape.vocabulary, shape.model_dim
        self.padding_idx, self.scale = padding_idx, scale
        self.map = nn.Embedding(shape.vocabulary, shape.map_dim)
        self.layers = nn.ModuleList(map(GroupLinear, shape.layers))
        self.reduce = nn.Linear(shape.features, shape.model_dim) if shape.reduction else None

    @property
    def weight(self) -> Tensor:
        """The map table [V, n]; classes look up the type and the rows of an embedding, and initialise it."""
        return self.map.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [...] -> scaled rows [..., m]."""
        rows = self.transform(self.map(ids))
        if self.padding_idx is not None:
            rows = rows.masked_fill((ids == self.padding_idx).unsqueeze(-1), 0.0)
        return rows * self.scale if self.scale != 1.0 else rows

    def transform(self, mapped: Tensor) -> Tensor:
        """Map vectors e [..., n] -> e_o [..., m] (eq. 1 with the skip connection of 3.3, then the reduction)."""
        *_, rows = self.stages(mapped.reshape(-1, self.shape.map_dim))
        return rows.view(*mapped.shape[:-1], self.embedding_dim)

    def stages(self, mapped: Tensor) -> Iterator[Tensor]:
        """e [rows, n], what each expansion layer makes of it [rows, k_l], and e_o [rows, m] from the reduction."""
        yield mapped
        values, last = mapped, len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            inputs = self.inputs(number, mapped, values)
            values = layer(inputs)
            if number < last or self.reduce is not None:
                values = functional.gelu(values)
            if number and self.shape.kind == "hgt-residual":
                values = values + inputs
            yield values
        if self.reduce is not None:
            yield self.reduce(values)

    def group_layer(self, number: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Weight [blocks, inputs / g, outputs / g] and bias [outputs] of an expansion layer, counted from 0."""
        layer = self.layers[number]
        assert isinstance(layer, GroupLinear)
        return layer.weight, layer.bias

    def inputs(self, number: int, first: Tensor, previous: Tensor) -> Tensor:
        """Return the inputs of layer `number`: e and the output before it, split and mixed, joined, or shuffled."""
        kind, groups = self.shape.kind, self.shape.groups[number]
        if not number:
            return previous
        if kind == "group-linear-shuffle":
            return previous.view(len(previous), groups, -1).transpose(1, 2).flatten(1)
        if kind not in SKIPPING:
            return previous
        if kind != "define" or groups == 1:
            return torch.cat([first, previous], dim=-1)
        parts = [values.view(len(values), groups, -1) for values in (first, previous)]
        return torch.cat(parts, dim=-1).flatten(1)

    @torch.no_grad()
    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` [stop - start, m] of the table that the unit stands for, unscaled (3.4)."""
        rows = self.transform(self.map.weight[start:stop])
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            rows[self.padding_idx - start] = 0.0
        return rows

    def expanded(self, chunk_rows: int = CHUNK_ROWS) -> Iterator[Tensor]:
        """The whole table, `chunk_rows` rows at a time: what a cached checkpoint stores."""
        for start in range(0, self.num_embeddings, chunk_rows):
            yield self.rows(start, min(start + chunk_rows, self.num_embeddings))


class DefineOutput(nn.Module):
    """Hidden states -> logits through the map table: (h P) U^T + b, where U [V, n] is the unit's `map.weight`.

    Attributes:
        project: P^T, the projection from m to n, without a bias.
        weight: U; assign the unit's `map.weight` to tie both.
        bias: [V], or None.
    """

    def __init__(self, shape: UnitShape, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = shape.model_dim, shape.vocabulary
        self.project = nn.Linear(shape.model_dim, shape.map_dim, bias=False)
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.map_dim))
        nn.init.normal_(self.weight, std=shape.map_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(shape.vocabulary)) if bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., m] -> [..., V]."""
        return functional.linear(self.project(hidden), self.weight, self.bias)


def fit_embeddings(model: Any, tables: TokenTables, names: Names) -> None:
    """Make the token embeddings of a stock model, built on the meta device, those that `tables` describes.

    The unit stands in the place of every module that shares the input table: one module, whose Parameters are there
    once. It takes over the factor of the module that it replaces. The output layer becomes logits (h P) U^T.

    Args:
        names: of tensors in the model.
    """
    if tables.unit is not None:
        places = [module_of(names(f"{alias}.weight")) for alias in (tables.input, *tables.aliases)]
        places = [place for place in places if has_part(model, place)]
        stock: Any = model.get_submodule(places[0])
        padding = padding_id(model.config, tables)
        with torch.device("meta"):
            unit = DefineEmbedding(tables.unit, padding_idx=padding, scale=_scale(stock))
        unit.to(stock.weight.dtype)
        for place in places:
            model.set_submodule(place, unit)
    output = tables.change.output
    name = module_of(names(f"{tables.output}.weight"))
    if output is not None and output.map_dim is not None and has_part(model, name):
        stock = model.get_submodule(name)
        shape = UnitShape(tables.vocabulary, output.map_dim, tables.model_dim, kind="projective")
        with torch.device("meta"):
            made = DefineOutput(shape, bias=stock.bias is not None)
        model.set_submodule(name, made.to(stock.weight.dtype))


def require_replaceable(trial: Trial) -> None:
    """Compare a small copy of a model that has a unit and a factorised output with one that has their tables.

    Raises:
        UnsupportedModelError: they differ: the class uses its tables in another way.
    """
    model = copy.deepcopy(trial.model)
    source, head = model.get_input_embeddings(), model.get_output_embeddings()
    kind, (vocabulary, width) = source.weight.dtype, source.weight.shape
    shape = UnitShape(vocabulary, 2, width, kind="projective")
    with torch.random.fork_rng(devices=[]):  # random numbers of the caller stay as they are
        torch.manual_seed(0)
        unit = DefineEmbedding(shape, scale=_scale(source)).to(kind)
        output = DefineOutput(shape).to(kind)
    shared = [name for name, part in model.named_modules() if getattr(part, "weight", None) is source.weight]
    with torch.no_grad():
        if head is not None:
            head.weight = nn.Parameter(output.weight @ output.project.weight)
            output.bias = getattr(head, "bias", None)
        source.weight.copy_(unit.rows(0, vocabulary))
    expected = trial.logits(model)
    for name, part in [*model.named_modules()]:
        if part is head:
            model.set_submodule(name, output)
        elif name in shared:
            model.set_submodule(name, unit)
    try:
        apart = float((trial.logits(model) - expected).abs().max() / expected.abs().max())
    except Exception as error:  # of any kind: what a class makes of another module
        raise UnsupportedModelError(
            f"its token embeddings cannot be factorised: its class takes no unit ({kind_and_reason(error)})"
        ) from error
    if not apart < NEAR:
        raise UnsupportedModelError(
            "its token embeddings cannot be factorised: a small copy of the model with a unit in the place of the "
            f"table computes something else than with the rows of that unit (by {apart:.0%})"
        )


def _scale(stock: Any) -> float:
    """The factor of the rows of a stock module. Gemma's is a buffer, not yet computed, and rounded as the rows are."""
    if (whole := getattr(stock, "scalar_embed_scale", None)) is not None:
        return float(torch.tensor(whole, dtype=stock.weight.dtype, device="cpu"))
    return float(getattr(stock, "embed_scale", 1.0))


def padding_id(config: Any, tables: TokenTables) -> int | None:
    """The token whose row the unit leaves zero; None where it treats the padding token as any other."""
    unit, token = tables.change.input, getattr(config, "pad_token_id", None)
    if unit is None or not unit.zero_padding or not isinstance(token, int):
        return None
    return token if 0 <= token < tables.vocabulary else None
