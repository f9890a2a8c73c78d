"""Writes a checkpoint of any declared family with random weights, of any size, to measure on.

    python benchmarks/make_checkpoint.py DIR --experts 64 --dtype float16 --shard-bytes 2GB
    python benchmarks/make_checkpoint.py DIR --family llama --set num_hidden_layers=8 --set hidden_size=2048 --pickled

The defaults make an NLLB-MoE of 4.4 GiB; other families have their stock sizes, of which `--set` changes any key of
config.json. Values are normal with the scale of a fresh model; they are cut from a pool, so that the disk sets the
pace. Memory stays under 150 MB (safetensors) or at about one shard (.bin). The tokenizer is the bundled demo's.

With `--hollow` the experts are holes in the files: they take no room on the disk and are read as zeros. NLLB-200 54.5B
(101.5 GiB) can be made so on any disk: `--layers 24 --experts 128 --d-model 2048 --ffn 8192 --vocab 256206 --hollow`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from prunecli import demo
from prunecli.architectures import NLLB_MOE
from prunecli.model.layout import resolve
from prunecli.model.structure import Structure
from prunecli.tensors.dtypes import config_dtype, itemsize, parse_dtype
from prunecli.tensors.quantities import parse_size

POOL = 1 << 22
"""Random values that all tensors are cut from."""

IDS = {"bos_token_id": 0, "decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The config.json, with the changes of `--set`."""
    config = nllb_moe_config(options) if options.family == "nllb-moe" else stock_config(options)
    for change in options.changes:
        key, equals, value = change.partition("=")
        if not equals:
            sys.exit(f"--set {change}: write it as KEY=VALUE")
        try:
            config[key] = json.loads(value)
        except ValueError:
            config[key] = value
    return config


def stock_config(options: argparse.Namespace) -> dict[str, Any]:
    """A model type's sizes as transformers has them by default."""
    from transformers import CONFIG_MAPPING

    from prunecli.model.skeleton import classes_of_type

    return {
        **CONFIG_MAPPING[options.family]().to_dict(),
        "architectures": classes_of_type(options.family)[:1],
        "dtype": config_dtype(parse_dtype(options.dtype)),
        **IDS,
    }


def nllb_moe_config(options: argparse.Namespace) -> dict[str, Any]:
    """A stock NLLB-MoE of the sizes that were asked for."""
    config: dict[str, Any] = {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "activation_function": "relu",
        "d_model": options.d_model,
        "dtype": config_dtype(parse_dtype(options.dtype)),
        "is_encoder_decoder": True,
        "max_position_embeddings": 1024,
        "moe_token_dropout": 0.2,
        "num_experts": options.experts,
        "router_bias": False,
        "router_dtype": "float32",
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "vocab_size": options.vocab,
        **IDS,
    }
    for side in ("encoder", "decoder"):
        config |= {
            f"{side}_attention_heads": max(1, options.d_model // 64),
            f"{side}_ffn_dim": options.ffn,
            f"{side}_layers": options.layers,
            f"{side}_sparse_step": options.sparse_step,
        }
    return config


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a model of the config stores."""
    if (
        config["model_type"] == "nllb-moe"
    ):  # of which transformers stores names for experts by the ten thousand
        return dict(resolve(NLLB_MOE, config, Structure()).shapes)
    import transformers

    from prunecli.model.skeleton import Skeleton

    model_class = getattr(transformers, config["architectures"][0])
    made = Skeleton(model_class, model_class.config_class, config)
    aliases = {made.stored_name(alias) for alias in made.model.all_tied_weights_keys}
    return {name: shape for name, shape in made.stored.items() if name not in aliases}


def shards_of(shapes: Mapping[str, tuple[int, ...]], size: int, limit: int) -> list[list[str]]:
    """Names in order, cut where a shard would exceed `limit` bytes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        nbytes = int(np.prod(shape)) * size
        if shards[-1] and filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


class Values:
    """Random values of any shape, cut from one pool at an offset that depends on the tensor's number."""

    def __init__(self, dtype: str, seed: int) -> None:
        kind = ml_dtypes.bfloat16 if dtype == "BF16" else {"F16": np.float16, "F32": np.float32}[dtype]
        drawn = np.random.default_rng(seed).standard_normal(POOL, dtype=np.float32)
        self.pools = {scale: (drawn * np.float32(scale)).astype(kind) for scale in (0.02, 1.0)}
        self.number = 0

    def pieces(self, name: str, count: int) -> Iterator[np.ndarray]:
        """`count` values, in pieces of at most the pool's length."""
        self.number += 1
        start = (self.number * 7919 * 64) % POOL
        pool = self.pools[1.0 if "norm" in name else 0.02]
        while count:
            piece = pool[start : start + count]
            yield piece
            count -= len(piece)
            start = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The whole tensor."""
        return np.concatenate(list(self.pieces(name, int(np.prod(shape))))).reshape(shape)


def write_safetensors(
    path: Path,
    names: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    values: Values,
    hollow: bool,
) -> None:
    """One .safetensors file, tensor by tensor; `hollow`: with holes in the place of experts."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        end = position + int(np.prod(shapes[name])) * itemsize(dtype)
        header[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        start = file.tell()
        for name in names:
            if hollow and ".experts." in name:
                continue
            file.seek(start + header[name]["data_offsets"][0])
            for piece in values.pieces(name, int(np.prod(shapes[name]))):
                file.write(piece.view(np.uint8).data)
        file.truncate(start + position)


def write_pickled(
    path: Path, names: list[str], shapes: Mapping[str, tuple[int, ...]], values: Values
) -> None:
    """One .bin file; its tensors are held in memory together."""
    import torch

    def tensor(name: str) -> torch.Tensor:
        made = values.tensor(name, shapes[name])
        if made.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(made.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(made)

    torch.save({name: tensor(name) for name in names}, path)


def make(options: argparse.Namespace) -> int:
    """Write the checkpoint; returns the bytes of its tensors."""
    directory, dtype = Path(options.directory), parse_dtype(options.dtype)
    config = config_of(options)
    shapes = shapes_of(config)
    shards = shards_of(shapes, itemsize(dtype), parse_size(options.shard_bytes))
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * itemsize(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    stem, ending = ("pytorch_model", "bin") if options.pickled else ("model", "safetensors")
    weight_map: dict[str, str] = {}
    values = Values(dtype, options.seed)
    for index, names in enumerate(shards, start=1):
        single = len(shards) == 1
        file = f"{stem}.{ending}" if single else f"{stem}-{index:05d}-of-{len(shards):05d}.{ending}"
        if options.pickled:
            write_pickled(directory / file, names, shapes, values)
        else:
            write_safetensors(directory / file, names, shapes, dtype, values, options.hollow)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        (directory / f"{stem}.{ending}.index.json").write_text(index_text)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(IDS, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo.CHECKPOINT / name, directory / name)
    return total


def main() -> None:
    """Parse, write, say how much."""
    parser = argparse.ArgumentParser(description="Write a random checkpoint.")
    parser.add_argument("directory")
    parser.add_argument("--family", default="nllb-moe", help="model type")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="KEY=VALUE", help="a key of config.json"
    )
    parser.add_argument("--layers", type=int, default=8, help="layers a side (NLLB-200 54.5B: 24)")
    parser.add_argument("--sparse-step", type=int, default=4, help="every n-th layer is sparse")
    parser.add_argument("--experts", type=int, default=64, help="experts per sparse layer (54.5B: 128)")
    parser.add_argument("--d-model", type=int, default=1024, help="width (54.5B: 2048)")
    parser.add_argument("--ffn", type=int, default=4096, help="hidden width of an FFN (54.5B: 8192)")
    parser.add_argument("--vocab", type=int, default=32_000, help="vocabulary (54.5B: 256206)")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--shard-bytes", default="2GB", help="largest shard")
    parser.add_argument("--pickled", action="store_true", help="write .bin files")
    parser.add_argument("--hollow", action="store_true", help="experts are holes: zeros that take no room")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total = make(options)
    print(f"{options.directory}: {total:,} bytes ({total / 2**30:.2f} GiB)", file=sys.stderr)


if __name__ == "__main__":
    main()
