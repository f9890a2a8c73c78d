"""Who runs whose tensors in a result of `share-ffn` or `share-attention`."""

from pathlib import Path

from prunecli.model.checkpoint import open_model


def owners(directory: Path | str, part: str = "ffns") -> dict[str, str | None]:
    """FFN or attention -> the one whose tensors it runs, None where it is gone; checks the checkpoint."""
    with open_model(directory) as opened:
        opened.check()
        layers = getattr(opened.layout, part)
        return {layer.name: None if layer.removed else layer.owner for layer in layers}
