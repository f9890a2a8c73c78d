"""Who runs whose tensors in a result of `share-ffn` or `share-attention`."""

from __future__ import annotations

from pathlib import Path

from prunecli.model.checkpoint import open_model


def owners(directory: Path | str, part: str = "ffns") -> dict[str, str | None]:
    """FFN or attention -> the one whose tensors it runs, None where it is gone; checks the checkpoint."""
    with open_model(directory) as opened:
        opened.check()
        layers = getattr(opened.layout, part)
        return {layer.name: None if layer.removed else layer.owner for layer in layers}


def check_preset(name: str, found: dict[str, str | None], encoder: str, decoder: str) -> None:
    """Check the owners in m2m_100, of three encoder and two decoder layers, against the name of a preset.

    Args:
        encoder, decoder: names of the layers' parts, with braces for the number.
    """
    first = {found[encoder.format(layer)] for layer in range(3)}
    second = {found[decoder.format(layer)] for layer in range(2)}
    assert len(first) == (3 if name in ("SharedDec", "NoDec") else 1)
    assert len(second) == (2 if name in ("SharedEnc", "NoEnc") else 1)
    assert (first == {None}) == name.startswith("NoEnc")
    assert (second == {None}) == (name.endswith("NoDec") or name == "OneWide")
    assert (first == second) == (name in ("SharedEncDec", "NoEncNoDec"))
