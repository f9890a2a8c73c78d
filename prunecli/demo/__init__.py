"""The bundled demos: six small artificial languages, their text, an NLLB-MoE trained on it, and a language model.

Three families of two sisters each, so that what a pruned model shares between languages can be seen at a glance:
Belic (`qba_Latn`, `qbo_Latn`), Kemic (`qka_Latn`, `qko_Latn`) and Nuric (`qna_Latn`, `qno_Latn`). The codes lie in
the range that ISO 639-3 reserves for local use (qaa to qtz); their second letter is the family. `tools/demo/` of the
repository made text and model.

The language model is a Qwen3-MoE, trained on sentences of Bela (`prose`) and on small programs (`code`).
"""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The trained model: a stock Hugging Face directory."""

DATA = Path(__file__).parent / "data"
"""Text, `SPLIT.LANG` with SPLIT one of val and test, and `train.LANG.gz`, aligned by line."""

LM_CHECKPOINT = Path(__file__).parent / "lm" / "checkpoint"
"""The language model: a stock Hugging Face directory."""

LM_DATA = Path(__file__).parent / "lm" / "data"
"""Its text, `SPLIT.NAME` with SPLIT one of val and test and NAME one of `LM_TEXTS`, one a line."""

LM_TEXTS = ("prose", "code")
"""Names of its texts."""
