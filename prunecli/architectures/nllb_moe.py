"""NLLB-200 54.5B and its kin: encoder and decoder, every n-th FFN a mixture of experts (2207.04672)."""

from typing import Literal

from prunecli.architectures.records import (
    SEQ2SEQ,
    Architecture,
    Attention,
    Carrier,
    FeedForward,
    Mixture,
    ModelClass,
    Part,
    Side,
    Stack,
    TensorSpec,
    TokenEmbedding,
)


def _linear(
    name: str, inputs: str, outputs: str, part: Part, units: Literal[0, 1]
) -> tuple[TensorSpec, TensorSpec]:
    """Weight `[outputs, inputs]` and bias `[outputs]` of a linear layer; `units`: on which axis the units lie."""
    own = Carrier(units)
    return (
        TensorSpec(f"{name}.weight", (outputs, inputs), part, units=own),
        TensorSpec(f"{name}.bias", (outputs,), part, units=None if units else own),
    )


def _norm(name: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{name}.{part}", ("d_model",), "norm") for part in ("weight", "bias"))


def _attention(name: str, kind: Literal["self", "cross"], heads: str) -> Attention:
    inputs = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    own = [_linear(one, "d_model", "d_model", "attention", 0) for one in inputs]
    own.append(_linear(f"{name}.out_proj", "d_model", "d_model", "attention", 1))
    tensors = tuple(spec for specs in own for spec in specs)
    return Attention(name, kind, heads, tensors, f"{name}.out_proj", (f"{name}_layer_norm",))


def _stack(side: Side, *cross: Attention) -> Stack:
    width = f"{side}_ffn_dim"
    ffn = FeedForward(
        "ffn",
        width,
        ("ff_layer_norm",),
        (*_linear("fc1", "d_model", width, "ffn", 0), *_linear("fc2", width, "d_model", "ffn", 1)),
        router=(
            TensorSpec("router.classifier.weight", ("expert_count", "d_model"), "router"),
            TensorSpec("router.classifier.bias", ("expert_count",), "router", optional="router_bias"),
        ),
        sparse_step=f"{side}_sparse_step",
    )
    attentions = (_attention("self_attn", "self", f"{side}_attention_heads"), *cross)
    names = [name for one in attentions for name in one.norms]
    norms = tuple(spec for name in (*names, *ffn.norms) for spec in _norm(name))
    return Stack(side, f"model.{side}.layers.{{layer}}", f"{side}_layers", attentions, ffn, norms)


NLLB_MOE = Architecture(
    model_type="nllb-moe",
    model_class="NllbMoeForConditionalGeneration",
    auto_class=SEQ2SEQ,
    classes=(
        ModelClass("NllbMoeModel", "AutoModel"),
        ModelClass("NllbMoeForConditionalGeneration", SEQ2SEQ, ("lm_head.",)),
    ),
    stock_fault="the stock routing of NLLB-MoE is wrong in transformers 5",
    stacks=(
        _stack("encoder"),
        _stack("decoder", _attention("cross_attention", "cross", "decoder_attention_heads")),
    ),
    tensors=(
        TensorSpec("model.shared.weight", ("vocab_size", "d_model"), "embeddings"),
        *_norm("model.encoder.layer_norm"),
        *_norm("model.decoder.layer_norm"),
    ),
    tied=dict.fromkeys(
        ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
        "model.shared.weight",
    ),
    buffers=("embed_positions.weights",),
    mixture=Mixture(
        blocks=("model.encoder.layers.{layer}.ffn", "model.decoder.layers.{layer}.ffn"),
        router=("router.classifier.weight", "router.classifier.bias"),
        counts=("num_experts",),
        top_k=2,
        expert="experts.expert_{expert}",
        depth="encoder_layers",
    ),
    attributes={
        "d_model": 1024,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "vocab_size": 128112,
        "encoder_sparse_step": 4,
        "decoder_sparse_step": 4,
        "num_experts": 128,
        "router_bias": False,
        "moe_token_dropout": 0.2,
        "activation_function": "relu",
        "max_position_embeddings": 1024,
    },
    embedding=TokenEmbedding("model.shared", "lm_head", ("NllbMoeForConditionalGeneration",)),
)
