"""Mixtral: Mistral's layout, every FFN a mixture of experts (2401.04088)."""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.classes import decoder_classes
from prunecli.architectures.common import gated_ffn, matrix
from prunecli.architectures.mistral import MISTRAL
from prunecli.architectures.mixtures import EXPERTS_ONLY
from prunecli.architectures.records import TokenEmbedding

(_STACK,) = MISTRAL.stacks

MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    model_class="MixtralForCausalLM",
    classes=decoder_classes("Mixtral"),
    stacks=(
        replace(
            _STACK,
            ffn=replace(
                _STACK.ffn,
                name="block_sparse_moe",
                tensors=gated_ffn(("w1", "w3", "w2"), "intermediate_size"),
                router=(matrix("gate", "hidden_size", "expert_count", "router"),),
                sparse_step="1",
                module="mlp",
            ),
        ),
    ),
    mixture=EXPERTS_ONLY["mixtral"].mixture,
    attributes={**MISTRAL.attributes, "num_local_experts": 8},
    embedding=TokenEmbedding("model.embed_tokens", "lm_head", ("MixtralForCausalLM",), apart=True),
)
