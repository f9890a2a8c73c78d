"""Tiny checkpoints with a tokenizer of each kind, trained in milliseconds on the text below."""

import io
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from tests.families import tiny_family
from tests.tiny import json_of, write_json

TEXT = (
    "the cat sat on the mat and the dog ran to the house",
    "a red house and a green garden stand at the end of the road",
    "der hund und die katze sitzen auf der matte im garten",
    "ein rotes haus steht am ende der strasse, und das licht ist an",
    "she reads nine books about houses, cats, dogs and gardens!",
    "where is the market? it is near the river, not near the road.",
    "the quick brown fox jumps over the lazy dog 0123456789",
)
"""What the tokenizers are trained on."""

SEEN = (TEXT[0], "the cats sat at the end of the garden road", "the house, the dog!")
"""What they are trimmed to; its second sentence is not among `TEXT`."""

DOCUMENT = f"{SEEN[0]}\n\n{SEEN[1]}.\n\n\n{SEEN[2]}"
"""The same sentences with blank lines between them."""

CHAT = "{% for message in messages %}<|{{ message.role }}|>\n\n{{ message.content }}\n{% endfor %}"
"""A chat template whose roles are ordinary text, written around a message without a special token."""

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_NAMES = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}


def byte_bpe(directory: Path) -> Path:
    """GPT-2 with a byte-level tokenizer.json; its only special token has the last id, which config.json leaves out."""
    tokenizer = _byte_bpe()
    size = tokenizer.get_vocab_size()
    return _with(directory, "gpt2", size, tokenizer, {"tokenizer_class": "GPT2Tokenizer", **_GPT2})


def byte_bpe_files(directory: Path) -> Path:
    """GPT-2 with vocab.json and merges.txt alone."""
    tokenizer = _byte_bpe()
    tiny_family(directory, "gpt2", vocab_size=tokenizer.get_vocab_size())
    (directory / "tokenizer.json").unlink()
    tokenizer.model.save(str(directory))
    vocab = json_of(directory / "vocab.json")
    vocab.setdefault(END, tokenizer.token_to_id(END))
    write_json(directory / "vocab.json", vocab)
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **_GPT2})
    return directory


END = "<|endoftext|>"
_GPT2 = {"bos_token": END, "eos_token": END, "unk_token": END}


def _byte_bpe() -> Any:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        (*TEXT * 4, *(f"{DOCUMENT}\n\n\n<|user|>\n\n<|assistant|>",) * 4),
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(alphabet), show_progress=False),
    )
    tokenizer.add_special_tokens([END])
    return tokenizer


def unigram(directory: Path) -> Path:
    """T5 with a Unigram tokenizer.json, two sentinels, and rows beyond the tokenizer's."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = {"special_tokens": ["<pad>", "</s>", "<unk>"], "unk_token": "<unk>"}
    trainer = trainers.UnigramTrainer(vocab_size=90, show_progress=False, **special)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.add_special_tokens(["<extra_id_1>", "<extra_id_0>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "extra_ids": 2}
    size = tokenizer.get_vocab_size() + 5
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "bos_token_id": None}
    return _with(directory, "t5", size, tokenizer, {"tokenizer_class": "T5Tokenizer", **names}, **ids)


def wordpiece(directory: Path) -> Path:
    """BERT with a tokenizer.json."""
    tokenizer = _wordpiece()
    return _with(directory, "bert", tokenizer.get_vocab_size(), tokenizer, _BERT, **_BERT_IDS)


def wordpiece_files(directory: Path) -> Path:
    """BERT with vocab.txt alone."""
    tokenizer = _wordpiece()
    tiny_family(directory, "bert", vocab_size=tokenizer.get_vocab_size(), **_BERT_IDS)
    (directory / "tokenizer.json").unlink()
    tokenizer.model.save(str(directory))
    write_json(directory / "tokenizer_config.json", _BERT)
    return directory


_BERT_NAMES = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
_BERT = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **_BERT_NAMES}
_BERT_IDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def _wordpiece() -> Any:
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    marks = [("[SEP]", tokenizer.token_to_id("[SEP]")), ("[CLS]", tokenizer.token_to_id("[CLS]"))]
    tokenizer.post_processor = processors.BertProcessing(*marks)
    return tokenizer


def word_level(directory: Path) -> Path:
    """Llama with whole words."""
    tokenizer = Tokenizer(WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIALS), show_progress=False)
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return _with(directory, "llama", tokenizer.get_vocab_size(), tokenizer, {**_FAST, **_NAMES})


_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def marian(directory: Path) -> Path:
    """Marian with source.spm and target.spm (Unigram), vocab.json in an order of its own, and a language code."""
    source = sentencepiece_model(TEXT[:2] + TEXT[4:], "unigram", 80)
    target = sentencepiece_model(TEXT[2:4] + TEXT[:1], "unigram", 60)
    pieces = {piece: None for data in (source, target) for piece in _pieces(data)}
    tokens = ["</s>", "<unk>", *sorted(set(pieces) - {"</s>", "<unk>", "<s>"}), ">>deu<<", "<pad>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    pad = vocab["<pad>"]
    ids = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    sizes = dict.fromkeys(("vocab_size", "decoder_vocab_size"), len(vocab))
    tiny_family(directory, "marian", bad_words_ids=[[pad]], **sizes, **ids)
    (directory / "tokenizer.json").unlink()
    (directory / "source.spm").write_bytes(source)
    (directory / "target.spm").write_bytes(target)
    write_json(directory / "vocab.json", vocab)
    settings = {"source_lang": "en", "target_lang": "de", "separate_vocabs": False}
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "MarianTokenizer", **settings})
    return directory


def m2m_100(directory: Path) -> Path:
    """M2M-100 with sentencepiece.bpe.model (BPE) and vocab.json; the codes of 100 languages follow, and 8 idle rows."""
    data = sentencepiece_model(TEXT, "bpe", 120)
    words = [piece for piece in _pieces(data) if piece not in SPECIALS]
    vocab = {token: number for number, token in enumerate((*SPECIALS, *words))}
    tiny_family(directory, "m2m_100", vocab_size=len(vocab) + 108)
    (directory / "tokenizer.json").unlink()
    (directory / "sentencepiece.bpe.model").write_bytes(data)
    write_json(directory / "vocab.json", vocab)
    settings = {"tokenizer_class": "M2M100Tokenizer", "src_lang": "en", "tgt_lang": "de"}
    settings |= _NAMES
    settings["additional_special_tokens"] = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    write_json(directory / "tokenizer_config.json", settings)
    return directory


def sentencepiece_model(text: tuple[str, ...], kind: str, size: int, **more: Any) -> bytes:
    """A model file of `kind` "unigram" or "bpe"."""
    made = io.BytesIO()
    options = {
        "vocab_size": size,
        "model_type": kind,
        "sentence_iterator": iter(text * 4),
        "model_writer": made,
        **more,
    }
    SentencePieceTrainer.train(hard_vocab_limit=False, num_threads=1, minloglevel=2, **options)
    return made.getvalue()


def _pieces(data: bytes) -> list[str]:
    model = SentencePieceProcessor(model_proto=data)
    return [model.id_to_piece(number) for number in range(model.get_piece_size())]


def _with(
    directory: Path, model_type: str, size: int, tokenizer: Any, settings: dict[str, Any], **config: Any
) -> Path:
    tiny_family(directory, model_type, vocab_size=size, **config)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", settings)
    return directory


KINDS = {
    maker.__name__: maker
    for maker in (byte_bpe, byte_bpe_files, unigram, wordpiece, wordpiece_files, word_level, marian, m2m_100)
}
"""Name -> maker, of every kind of tokenizer."""
