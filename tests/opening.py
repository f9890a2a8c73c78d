"""How results open through transformers: the Auto class of the model that config.json names."""

from collections.abc import Mapping
from typing import Any


def headed_class(config: Mapping[str, Any]) -> str:
    """The `AutoModel…` whose class in `auto_map` is the first one under `architectures`."""
    named = f"modeling_prunecli.{config['architectures'][0]}"
    found = {value: auto for auto, value in config["auto_map"].items()}
    return found[named]
