"""A plain checkpoint made into a quantised one, and into the plain one that it stands for."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.reference.quantisation import SCHEMES, mxfp4
from tests.tiny import change_config


def quantise(
    source: Path | str, stored: Path | str, plain: Path | str, scheme: str, which: Callable[[str], bool]
) -> None:
    """Two directories of the model in `source`, a single file of safetensors.

    Args:
        stored: its matrices are quantised.
        plain: they hold what these stand for.
        scheme: of `SCHEMES`; "mxfp4" for stacked experts.
        which: whether the tensor of a name is quantised.
    """
    tensors = load_file(f"{source}/model.safetensors")
    held, values = {}, {}
    settings = {"quant_method": "mxfp4"}
    for name, tensor in tensors.items():
        held[name] = values[name] = tensor
        if not which(name) or tensor.dim() < 2:
            continue
        del held[name]
        if scheme == "mxfp4":
            made = mxfp4(tuple(tensor.shape))  # type: ignore[arg-type]
            held |= {f"{name}_{part}": value for part, value in made.parts.items()}
        else:
            quantised, settings = SCHEMES[scheme]
            made = quantised(tensor.float())
            held |= {f"{name.removesuffix('weight')}{part}": value for part, value in made.parts.items()}
        values[name] = made.values.to(tensor.dtype)
    for directory, content in ((stored, held), (plain, values)):
        shutil.copytree(source, directory)
        content = {name: tensor.contiguous().clone() for name, tensor in content.items()}
        save_file(content, f"{directory}/model.safetensors", metadata={"format": "pt"})
    change_config(stored, quantization_config=settings)
    assert any(tensor.dtype != torch.float32 for tensor in held.values())
