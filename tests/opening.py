"""How results open: as models, and through the Auto class of transformers that config.json names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prunecli.modules.loading import load_model


def headed_class(config: Mapping[str, Any]) -> str:
    """The `AutoModel…` whose class in `auto_map` is the first one under `architectures`."""
    named = f"modeling_prunecli.{config['architectures'][0]}"
    found = {value: auto for auto, value in config["auto_map"].items()}
    return found[named]


def load(directory: Path | str) -> Any:
    """The model in a directory, in float32 on the CPU whatever is stored."""
    return load_model(directory, device="cpu", dtype="float32")
