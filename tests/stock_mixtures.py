"""Tiny mixture-of-experts language models of transformers' own classes, held in memory, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from prunecli.architectures import EXPERTS_ONLY
from tests.families.mixtures import EXPERTS, TINY

OBSERVED = tuple(name for name in TINY if name not in ("llama4_text", "switch_transformers"))
"""The families whose classes let their experts be run by a function of one's own."""


def tiny_mixture(model_type: str, *, seed: int = 0, **config: Any) -> Any:
    """A model in float32, in evaluation mode: weights that tell tokens apart, biases of routers too.

    Args:
        config: in place of what `TINY` says.
    """
    import transformers

    made = transformers.CONFIG_MAPPING[model_type](**{**TINY[model_type], **config})
    model = getattr(transformers, EXPERTS_ONLY[model_type].model_class)(made).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "bias" in name and tensor.shape[-1:] == (EXPERTS,):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1)
            elif tensor.dim() > 1 and tensor.is_floating_point() and "A_log" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model
