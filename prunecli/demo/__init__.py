"""The bundled demo: six small artificial languages, their text, and an NLLB-MoE trained on it.

Three families of two sisters each, so that what a pruned model shares between languages can be seen at a glance:
Belic (`qba_Latn`, `qbo_Latn`), Kemic (`qka_Latn`, `qko_Latn`) and Nuric (`qna_Latn`, `qno_Latn`). The codes lie in
the range that ISO 639-3 reserves for local use (qaa to qtz); their second letter is the family. `tools/demo/` of the
repository made text and model.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""The trained model: a stock Hugging Face directory."""

DATA: Path = Path(__file__).parent / "data"
"""Text, `SPLIT.LANG` with SPLIT one of val and test, and `train.LANG.gz`, aligned by line."""

LANGUAGES: tuple[str, ...] = ("qba_Latn", "qbo_Latn", "qka_Latn", "qko_Latn", "qna_Latn", "qno_Latn")
"""The language codes, sisters side by side."""

__all__ = ["CHECKPOINT", "DATA", "LANGUAGES"]
