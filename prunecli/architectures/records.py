"""What a model family is made of, as frozen records. A family is a value of `Architecture`: data, no logic.

A shape's axis is a key of config.json (`d_model`); `expert_count` stands for the number of experts of the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Part = Literal["embeddings", "attention", "ffn", "experts", "router", "norm", "other"]
Side = Literal["encoder", "decoder"]
SEQ2SEQ = "AutoModelForSeq2SeqLM"


@dataclass(frozen=True)
class Carrier:
    """Position in one tensor of the units of an axis: each has the same share of a dimension.

    Attributes:
        dim: of the tensor; 0 for the rows of a linear layer's weight.
        blocks: all units occur on it once for each of these, one block after another: three times where query, key
            and value are fused, twice where gate and up are. Each is the width of one unit there as a multiple of the
            others': of several query heads on one key/value head, say.
        tail: widths of a unit that lie behind all blocks, and that no unit has alone: the one key and value of several
            fused queries.
    """

    dim: int
    blocks: tuple[int, ...] = (1,)
    tail: int = 0

    def unit(self, size: int, held: int) -> int:
        """Return the width that `blocks` are multiples of, on a dimension of length `size` with `held` units."""
        return size // (sum(self.blocks) * held + self.tail)

    def length(self, kept: int, size: int, held: int) -> int:
        """Return the length of the dimension with `kept` units."""
        return self.unit(size, held) * (sum(self.blocks) * kept + self.tail)

    def ranges(self, places: Sequence[int], size: int, held: int) -> tuple[tuple[int, int], ...]:
        """Index ranges (start, stop) of the units at `places`, block after block, and of the tail."""
        unit = self.unit(size, held)
        found, start = [], 0
        for block in self.blocks:
            width = block * unit
            found += [(start + place * width, start + (place + 1) * width) for place in places]
            start += held * width
        return (*found, (start, size))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the family's stock layout.

    Attributes:
        name: relative to its owner (the model, a layer, an FFN, an expert): `self_attn.q_proj.weight`.
        shape: `[out, in]` for a linear layer's weight.
        part: what `inspect` counts it under.
        optional: the config key under which true says that the tensor exists, or None: it does.
        units: where the heads of its attention, or the hidden units of its FFN, lie, or None: it does not change with
            them.
        first: only the first layer of a stack has it.
    """

    name: str
    shape: tuple[str, ...]
    part: Part
    optional: str | None = None
    units: Carrier | None = None
    first: bool = False


@dataclass(frozen=True)
class Attention:
    """One attention of a layer.

    Attributes:
        name: of its module, relative to the layer; also its name in `Structure`.
        heads: config key that holds the number of heads; of key/value heads where several query heads share one.
        tensors: relative to the layer.
        output: the linear layer that mixes the heads, relative to the layer: its input is their outputs in order.
        norms: those that belong to it, before or after it, relative to the layer: they go where the attention goes.
        projections: the stock module that holds the projections, relative to the layer, where it is not `name`.
        position_bias: whether it is given a position bias for all of the original heads, and picks its own.
        residual: of these, the one whose output is added to the residual stream; None: that of `output` is.
        removable: whether a model can run without it.
    """

    name: str
    kind: Literal["self", "cross"]
    heads: str
    tensors: tuple[TensorSpec, ...]
    output: str
    norms: tuple[str, ...]
    projections: str | None = None
    position_bias: bool = False
    residual: str | None = None
    removable: bool = True


@dataclass(frozen=True)
class FeedForward:
    """A layer's FFN, dense or sparse; the tensors' names are relative to the FFN.

    Attributes:
        name: relative to the layer; "" where its parts lie in the layer itself.
        width: config key of the hidden width; "": it has no hidden units that are one axis.
        norms: those that belong to it, before or after it, relative to the layer: they go where the FFN goes.
        residual: of these, the one whose output is added to the residual stream; None: its own output is.
        tensors: those of a dense FFN, or of an expert.
        router: those of a sparse layer's router; its first axis is the expert.
        sparse_step: config key: every n-th layer of the original model is sparse, none where it is absent or 0.
        module: the module of the running model, relative to the layer, where it is not `name`.
        removable: whether a model can run without it.
    """

    name: str
    width: str
    norms: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    router: tuple[TensorSpec, ...] = ()
    sparse_step: str | None = None
    residual: str | None = None
    module: str | None = None
    removable: bool = True


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups of like size, of which the router first chooses some, then experts of those.

    Attributes:
        count: config key of the number of groups.
        chosen: config key of how many groups the router chooses for a token.
        least: experts that a group must have: 2 where its score is the sum of its two best experts'.
        condition: under which the router groups at all; None: always.
    """

    count: str
    chosen: str
    least: int = 2
    condition: str | None = None


@dataclass(frozen=True)
class Mixture:
    """How a checkpoint stores mixtures of experts. Names are relative to the block; keys may lie within others (`a.b`).

    Attributes:
        blocks: names of the modules that may hold one; `{layer}` is the layer's number.
        router: tensors whose first axis is the expert.
        counts: config keys of the number of experts: every one that a config states is rewritten.
        top_k: config keys of the experts per token, or the number where no config says it.
        default_top_k: transformers' default where a config leaves it out.
        expert: what hangs below one expert, whatever it is called; `{expert}` is its number. None: all are stacked.
        stacked: beginnings of the names of tensors whose first axis is the expert, their companions' among them.
        vectors: other tensors with an entry for each expert -> the axis on which these lie.
        groups: those of the experts; None: they have none.
        depth: config key of the number of layers: blocks of later ones predict further tokens.
        predicting: beginnings of the full names of layers that predict further tokens.
        predicted: config keys of the number of such layers.
        capacity: config key of the tokens that an expert takes of a sequence; None: as many as come.
        shared: beginnings of the names of experts that serve every token, their gate, and an attention beside them.
    """

    blocks: tuple[str, ...]
    router: tuple[str, ...]
    counts: tuple[str, ...]
    top_k: tuple[str, ...] | int
    default_top_k: int | None = None
    expert: str | None = "experts.{expert}"
    stacked: tuple[str, ...] = ()
    vectors: dict[str, int] = field(default_factory=dict)
    groups: ExpertGroups | None = None
    depth: str = "num_hidden_layers"
    predicting: tuple[str, ...] = ()
    predicted: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    capacity: str | None = None
    shared: tuple[str, ...] = ("shared_", "attention.", "self_attn.")


@dataclass(frozen=True)
class Stack:
    """A column of like layers: the encoder or the decoder.

    Attributes:
        side: which of the two; a model with one stack has the side of its kind.
        layers: prefix of one layer; `{layer}` is its number.
        depth: config key of the number of layers.
        norms: the layer's norms, the FFN's among them, relative to the layer.
    """

    side: Side
    layers: str
    depth: str
    attentions: tuple[Attention, ...]
    ffn: FeedForward
    norms: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class TokenEmbedding:
    """Input table and output layer of the tokens.

    Attributes:
        input: the module of the table, whose `weight` is one of `Architecture.tensors`; modules that share it are
            aliases in `Architecture.tied`. A factor of the rows (`scale_embedding`) is the stock module's affair.
        output: the linear layer that makes logits of hidden states.
        classes: those of transformers that have the output layer.
    """

    input: str
    output: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ModelClass:
    """A class of transformers of the family, and the `AutoModel…` that opens it.

    Attributes:
        name: "BertForSequenceClassification".
        auto_class: "AutoModelForSequenceClassification".
        needs: beginnings of the names of tensors that it has beside the base model's, one of each at least; a tied
            alias is enough.
        labelled: whether other classes of the family read the same tensors as other labels: of those that fit, only
            the one that config.json names, or else the first, gives them the meaning that they were trained with.
    """

    name: str
    auto_class: str
    needs: tuple[str, ...] = ()
    labelled: bool = False


@dataclass(frozen=True)
class Architecture:
    """A model family in its stock Hugging Face layout.

    Attributes:
        model_type: as in config.json.
        model_class: the class of transformers that runs it where config.json names none of the family's.
        auto_class: the `AutoModel…` that opens it.
        stacks: encoder, decoder, or one of them; none where the experts alone are declared.
        tensors: those outside of the layers.
        tied: other names under which a tensor may appear or may be left out: {alias: stored name}.
        loose: those of the aliases that are only tied where `tie_word_embeddings` is true; else they are tensors of
            their own, declared with `optional="!tie_word_embeddings"` or among the extras.
        buffers: name endings of tensors that some checkpoints hold although the model computes them.
        mixture: how its mixtures of experts are stored; None: it has none.
        head_counts: config keys that hold the number of heads, where config.json also holds the width of a head: a
            stock model can then have fewer, the same number in every layer.
        head_width: config key of that width.
        heads_divide: config key of a size that the number of heads has to divide, though the width of a head is
            stated: transformers refuses a config where it does not.
        classes: those of transformers that run it, the base model first.
        stock_fault: why the stock classes must not run it; None: they may.
        attributes: config defaults of transformers for keys that a config.json may leave out; a text that stands for
            a count is read as a shape's axis is (`hidden_size/num_attention_heads`), and for a null too.
        vocabulary: config keys of the number of tokens; empty: none is known.
        embedding: where tokens come in and go out; None: their tables cannot be factorised.
        found: the class that was asked, where nothing is declared (`model.found.Found`); None: the record is declared.
    """

    model_type: str
    model_class: str
    auto_class: str
    stacks: tuple[Stack, ...] = ()
    tensors: tuple[TensorSpec, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)
    loose: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    mixture: Mixture | None = None
    head_counts: tuple[str, ...] = ()
    head_width: str | None = None
    heads_divide: str | None = None
    classes: tuple[ModelClass, ...] = ()
    stock_fault: str | None = None
    attributes: dict[str, int | float | bool | str] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ("vocab_size",)
    embedding: TokenEmbedding | None = None
    found: Any = None
