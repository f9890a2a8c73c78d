"""The demo's tokenizer: BPE over all six languages, as an NllbTokenizer with the language codes as special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tools.demo.languages import BY_CODE

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)


def build_tokenizer(sentences: Iterable[str], vocab_size: int) -> Any:
    """Learn a BPE of `vocab_size` pieces; `<mask>` and the language codes come on top.

    Pieces are learned with the punctuation split off, so that no merge crosses it: NllbTokenizer splits at spaces
    only, and finds the same pieces.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import NllbTokenizer

    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False)
    bpe.train_from_iterator(sentences, trainer)
    learned = json.loads(bpe.to_str())["model"]
    return NllbTokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        src_lang=next(iter(BY_CODE)),
        extra_special_tokens=list(BY_CODE),
    )
