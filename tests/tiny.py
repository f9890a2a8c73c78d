"""Real tiny checkpoints, written in milliseconds: random weights, stock layout, a working tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

LANGUAGES = ("deu_Latn", "eng_Latn", "fra_Latn")
PIECES = ("\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'-")
MERGES = (("\u2581", "a"), ("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("e", "n"), ("o", "n"), ("i", "n"))
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
VOCAB = len(SPECIALS) + len(PIECES) + len(MERGES) + 1
"""Tokens of `write_plain_tokenizer`: the last special token is <mask>."""
NUMPY_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CONFIG_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def tiny_nllb_moe(
    directory: Path | str,
    *,
    experts: int = 8,
    shards: int = 1,
    pickled: bool = False,
    seed: int = 0,
    d_model: int = 16,
    ffn: int = 32,
    layers: int = 4,
    sparse_step: int = 2,
    dtype: str = "F32",
    router_bias: bool = False,
    vocab: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A stock NLLB-MoE directory: `layers` a side, every `sparse_step`-th sparse with `experts` experts.

    `vocab` (default: just what the tokenizer has) may be larger than the tokenizer's own size; `dtype` is
    F32, F16 or BF16; `config` overrides keys of config.json. With `pickled` the weights are `.bin` files.
    Embeddings are tied and stored once, as model.shared.weight.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(directory)
    vocab = size if vocab is None else max(vocab, size)
    values = tiny_config(experts, d_model, ffn, layers, sparse_step, vocab)
    values |= {"dtype": CONFIG_DTYPES[dtype], "router_bias": router_bias, **(config or {})}
    write_json(directory / "config.json", values)
    write_json(directory / "generation_config.json", _GENERATION)
    write_weights(directory, random_tensors(values, seed, dtype), shards=shards, pickled=pickled)
    return directory


def fewer_experts(directory: Path | str, kept: Sequence[int], *history: Any, **options: Any) -> Path:
    """A `tiny_nllb_moe` whose config.json says that each layer kept these of 8 experts."""
    layers = [f"model.{side}.layers.{layer}.ffn" for side in ("encoder", "decoder") for layer in (1, 3)]
    mark = {"version": 1, "history": list(history), "experts": dict.fromkeys(layers, tuple(kept))}
    mark["original_experts"] = dict.fromkeys(layers, 8)
    return tiny_nllb_moe(directory, experts=len(kept), config={"prunecli": mark}, **options)


_IDS = {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
_GENERATION = {**_IDS, "max_length": 64, "transformers_version": "5.23.0"}


def tiny_config(
    experts: int, d_model: int, ffn: int, layers: int, sparse_step: int, vocab: int
) -> dict[str, Any]:
    config = {
        "model_type": "nllb-moe",
        "architectures": ["NllbMoeForConditionalGeneration"],
        "transformers_version": "5.23.0",
        **_IDS,
    }
    config |= dict.fromkeys(("is_encoder_decoder", "scale_embedding", "tie_word_embeddings"), True)
    config |= {"num_experts": experts, "expert_capacity": 64, "router_bias": False, "router_dtype": "float32"}
    config |= {
        "activation_function": "relu",
        "activation_dropout": 0.0,
        "dropout": 0.0,
        "moe_token_dropout": 0.2,
    }
    config |= {"d_model": d_model, "max_position_embeddings": 64, "vocab_size": vocab, "dtype": "float32"}
    for side in ("encoder", "decoder"):
        config |= {
            f"{side}_attention_heads": 2,
            f"{side}_ffn_dim": ffn,
            f"{side}_layerdrop": 0.0,
            f"{side}_layers": layers,
            f"{side}_sparse_step": sparse_step,
        }
    return config


def random_tensors(config: Mapping[str, Any], seed: int = 0, dtype: str = "F32") -> dict[str, np.ndarray]:
    """Every stored tensor of the stock layout, with random values; norms lie near the identity."""
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 1.0 if "router" in name else 0.02 if name.endswith("bias") else 1 / np.sqrt(shape[-1])
        values = generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        if "layer_norm.weight" in name:
            values = 1 + np.float32(0.02) * values
        tensors[name] = np.ascontiguousarray(values.astype(NUMPY_DTYPES[dtype]))
    return tensors


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every stored tensor, restated by hand rather than from prunecli's records."""
    width, shapes = config["d_model"], dict[str, tuple[int, ...]]()

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    shapes["model.shared.weight"] = (config["vocab_size"], width)
    for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "cross_attention"))):
        ffn, step = config[f"{side}_ffn_dim"], config[f"{side}_sparse_step"]
        for index in range(config[f"{side}_layers"]):
            layer = f"model.{side}.layers.{index}"
            for attention in attentions:
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    linear(f"{layer}.{attention}.{projection}", width, width)
                norm(f"{layer}.{attention}_layer_norm")
            norm(f"{layer}.ff_layer_norm")
            blocks = [f"{layer}.ffn"]
            if step > 0 and (index + 1) % step == 0:
                shapes[f"{layer}.ffn.router.classifier.weight"] = (config["num_experts"], width)
                if config["router_bias"]:
                    shapes[f"{layer}.ffn.router.classifier.bias"] = (config["num_experts"],)
                blocks = [f"{layer}.ffn.experts.expert_{expert}" for expert in range(config["num_experts"])]
            for block in blocks:
                linear(f"{block}.fc1", ffn, width)
                linear(f"{block}.fc2", width, ffn)
        norm(f"model.{side}.layer_norm")
    return shapes


def write_weights(
    directory: Path, tensors: Mapping[str, np.ndarray], *, shards: int = 1, pickled: bool = False
) -> tuple[Path, ...]:
    """Write `tensors`, in their order, as one file or as `shards` files with an index; returns the files."""
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    names = list(tensors)
    if shards == 1:
        groups = {f"{stem}.{ending}": names}
    else:
        bounds = [round(index * len(names) / shards) for index in range(shards + 1)]
        groups = {
            f"{stem}-{index + 1:05d}-of-{shards:05d}.{ending}": names[bounds[index] : bounds[index + 1]]
            for index in range(shards)
        }
        metadata = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        weight_map = {name: file for file, members in groups.items() for name in members}
        index = {"metadata": metadata, "weight_map": weight_map}
        write_json(directory / f"{stem}.{ending}.index.json", index)
    for file, members in groups.items():
        chosen = {name: tensors[name] for name in members}
        if pickled:
            _save_pickled(directory / file, chosen)
        else:
            save_file(chosen, directory / file, metadata={"format": "pt"})
    return tuple(directory / file for file in groups)


def _save_pickled(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    import torch

    def tensor(value: np.ndarray) -> torch.Tensor:
        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(value.copy())

    torch.save({name: tensor(value) for name, value in tensors.items()}, path)


def write_tokenizer(directory: Path) -> int:
    """Write the files of an NllbTokenizer over letters and a few merges; returns its number of tokens."""
    tokenizer, first = _tokenizer(LANGUAGES), LANGUAGES[0]
    _surround(tokenizer, (f"{first} $A </s>", f"{first} $A $B </s>"), (first, "</s>"))
    settings = {"tokenizer_class": "NllbTokenizer", "backend": "tokenizers", "legacy_behaviour": False}
    settings |= {"extra_special_tokens": list(LANGUAGES), "src_lang": first, "tgt_lang": None}
    return _write_tokenizer(directory, tokenizer, settings)


def write_plain_tokenizer(
    directory: Path | str, template: tuple[str, str] | None = None, *, begins: str = "<s>"
) -> int:
    """Write the files of a tokenizer over letters and a few merges; returns its number of tokens.

    <s>, <pad>, </s>, <unk> and <mask> are its special tokens; `template` says which of them stand around one text and
    around two, `begins` what its bos token is.
    """
    tokenizer = _tokenizer(())
    if template is not None:
        _surround(tokenizer, template, ("<s>", "</s>"))
    settings = {"bos_token": begins, "tokenizer_class": "PreTrainedTokenizerFast"}
    return _write_tokenizer(directory, tokenizer, settings)


def _tokenizer(languages: Sequence[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pieces = (*SPECIALS, *PIECES, *("".join(merge) for merge in MERGES))
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=list(MERGES), unk_token="<unk>", fuse_unk=True))
    metaspace = {"replacement": "\u2581", "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**metaspace)
    tokenizer.decoder = decoders.Metaspace(**metaspace)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=True, special=True)])
    tokenizer.add_special_tokens([AddedToken(code, special=True) for code in languages])
    return tokenizer


def _surround(tokenizer: Any, template: tuple[str, str], specials: Sequence[str]) -> None:
    from tokenizers import processors

    ids = [(token, tokenizer.token_to_id(token)) for token in specials]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template[0], pair=template[1], special_tokens=ids
    )


def _write_tokenizer(directory: Path | str, tokenizer: Any, config: Mapping[str, Any]) -> int:
    tokenizer.save(f"{directory}/tokenizer.json")
    common = {f"{name}_token": f"<{name}>" for name in ("mask", "pad", "unk")}
    common |= {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    write_json(f"{directory}/tokenizer_config.json", {**common, "model_max_length": 64, **config})
    return int(tokenizer.get_vocab_size())


def write_files(folder: Path | str, texts: Mapping[str, str]) -> None:
    """Write files of text into a folder, a new one if there is none."""
    Path(folder).mkdir(exist_ok=True)
    for name, text in texts.items():
        Path(folder, name).write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> Path:
    """Write plain JSON with a newline at its end; return the path."""
    Path(path).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return Path(path)


def json_of(path: Path | str) -> Any:
    """The content of a file of JSON."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def config_of(directory: Path | str) -> dict[str, Any]:
    """The config.json of a checkpoint."""
    return json_of(f"{directory}/config.json")


def change_json(path: Path | str, *without: str, **changes: Any) -> None:
    """Remove keys of a file, and give others new values."""
    kept = {key: value for key, value in json_of(path).items() if key not in without}
    write_json(path, {**kept, **changes})


def change_config(directory: Path | str, *without: str, **changes: Any) -> None:
    """Change a checkpoint's config.json so."""
    change_json(f"{directory}/config.json", *without, **changes)
