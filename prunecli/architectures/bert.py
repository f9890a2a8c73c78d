"""BERT and its kin: RoBERTa, XLM-RoBERTa and DistilBERT, each with any of its task heads."""

from __future__ import annotations

from functools import partial

from prunecli.architectures.classes import BERT_HEADS, DISTILBERT_HEADS, ROBERTA_HEADS, model_classes
from prunecli.architectures.records import (
    Architecture,
    ModelClass,
    Stack,
    TensorSpec,
    TokenEmbedding,
    attention,
    embeddings,
    feed_forward,
    norm,
    stack,
)


def bert_stack(model: str) -> Stack:
    """BERT's encoder, below `model`."""
    own = attention(
        "attention",
        "self",
        "num_attention_heads",
        ("self.query", "self.key", "self.value"),
        "output.dense",
        "hidden_size",
        ("attention.output.LayerNorm",),
        projections="attention.self",
    )
    ffn = feed_forward(
        "",
        "intermediate_size",
        ("output.LayerNorm",),
        ("intermediate.dense", "output.dense"),
        "hidden_size",
    )
    layers, norms = f"{model}.encoder.layer.{{layer}}", partial(norm, width="hidden_size")
    return stack("encoder", layers, "num_hidden_layers", [own], ffn, norms)


def bert_embeddings(model: str) -> tuple[TensorSpec, ...]:
    """BERT's three tables of embeddings and the norm after them, below `model`."""
    return (
        embeddings(f"{model}.embeddings.word_embeddings", "vocab_size", "hidden_size"),
        embeddings(f"{model}.embeddings.position_embeddings", "max_position_embeddings", "hidden_size"),
        embeddings(f"{model}.embeddings.token_type_embeddings", "type_vocab_size", "hidden_size"),
        *norm(f"{model}.embeddings.LayerNorm", "hidden_size"),
    )


BERT_SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "tie_word_embeddings": True,
}
"""Defaults that BERT and RoBERTa share."""

BERT_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

BERT_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")


def _like_bert(
    model_type: str,
    prefix: str,
    head: tuple[str, str],
    classes: tuple[ModelClass, ...],
    with_output: tuple[str, ...],
    vocab_size: int,
) -> Architecture:
    """A family with BERT's layers.

    Args:
        prefix: the module of the base model in a headed one.
        head: the module of the masked language model's head, and of its output layer and that layer's bias.
        with_output: the classes that have the output layer, the first of which is the family's own.
    """
    module, output = head
    words = f"{prefix}.embeddings.word_embeddings"
    tied = {f"{output}.decoder.weight": f"{words}.weight", f"{output}.decoder.bias": f"{output}.bias"}
    return Architecture(
        model_type=model_type,
        model_class=with_output[0],
        auto_class="AutoModelForMaskedLM",
        classes=classes,
        pooler=f"{prefix}.pooler.",
        stacks=(bert_stack(prefix),),
        tensors=bert_embeddings(prefix),
        tied=tied,
        loose=tuple(tied),
        extras=(f"{prefix}.pooler.", f"{module}.", "classifier.", "qa_outputs."),
        renamed=BERT_RENAMED,
        buffers=BERT_BUFFERS,
        attributes={**BERT_SIZES, "vocab_size": vocab_size},
        embedding=TokenEmbedding(words, f"{output}.decoder", with_output, apart=True),
    )


# 1810.04805
BERT = _like_bert(
    "bert",
    "bert",
    ("cls", "cls.predictions"),
    model_classes("Bert", BERT_HEADS),
    ("BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"),
    30522,
)
# 1907.11692. Positions begin at `pad_token_id + 1`.
ROBERTA = _like_bert(
    "roberta",
    "roberta",
    ("lm_head", "lm_head"),
    model_classes("Roberta", ROBERTA_HEADS),
    ("RobertaForMaskedLM", "RobertaForCausalLM"),
    50265,
)
# 1911.02116
XLM_ROBERTA = _like_bert(
    "xlm-roberta",
    "roberta",
    ("lm_head", "lm_head"),
    model_classes("XLMRoberta", ROBERTA_HEADS),
    ("XLMRobertaForMaskedLM", "XLMRobertaForCausalLM"),
    30522,
)

# 1910.01108
_NORM = partial(norm, width="dim")
_DISTILBERT_STACK = stack(
    "encoder",
    "distilbert.transformer.layer.{layer}",
    "n_layers",
    [
        attention(
            "attention",
            "self",
            "n_heads",
            ("q_lin", "k_lin", "v_lin"),
            "out_lin",
            "dim",
            ("sa_layer_norm",),
        )
    ],
    feed_forward("ffn", "hidden_dim", ("output_layer_norm",), ("lin1", "lin2"), "dim"),
    _NORM,
)

DISTILBERT = Architecture(
    model_type="distilbert",
    model_class="DistilBertForMaskedLM",
    auto_class="AutoModelForMaskedLM",
    classes=model_classes("DistilBert", DISTILBERT_HEADS),
    stacks=(_DISTILBERT_STACK,),
    tensors=(
        embeddings("distilbert.embeddings.word_embeddings", "vocab_size", "dim"),
        embeddings("distilbert.embeddings.position_embeddings", "max_position_embeddings", "dim"),
        *_NORM("distilbert.embeddings.LayerNorm"),
    ),
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    loose=("vocab_projector.weight",),
    extras=(
        "vocab_transform.",
        "vocab_layer_norm.",
        "vocab_projector.",
        "pre_classifier.",
        "classifier.",
        "qa_outputs.",
    ),
    renamed=BERT_RENAMED,
    buffers=("embeddings.position_ids",),
    attributes={
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "n_layers": 6,
        "n_heads": 12,
        "dim": 768,
        "hidden_dim": 3072,
        "tie_word_embeddings": True,
    },
    embedding=TokenEmbedding(
        "distilbert.embeddings.word_embeddings", "vocab_projector", ("DistilBertForMaskedLM",), apart=True
    ),
)
