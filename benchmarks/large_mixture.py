"""A generated checkpoint in the layout of Qwen3-235B-A22B, larger than memory, beside the disk, products and `cp`.

    python benchmarks/large_mixture.py /data/scratch --size 40GB --tokens 4000
    python benchmarks/large_mixture.py /data/scratch --size 20GB --tokens 4000 --fp8 --rounds 2

In the folder, which is made and deleted again: 94 layers of 128 experts, 8 for a token, grouped-query attention with
norms of queries and keys, in shards of 4 GB with an index; in bfloat16, or FP8 with a scale for each 128 x 128 values.
Only the widths are less. Takes `--size` on the disk and once more what `prune-experts` keeps. Each of `--parts` prints
a time beside its baseline, taken in the same run:

- collect: `collect-gates --memory` / the larger of reading the files once in a plain loop, both after the page cache
  was asked to forget them, and the layers' matrix products alone, an even share of tokens for each expert; and what
  a thread takes to read, decode or cast all weights that are in the page cache.
- resume: the same, killed once it has kept its states (it does so once a minute), and started again.
- processes: the same by two processes of half the threads each.
- prune: `prune-experts` and `cp` of what it keeps, by turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import runs
import torch
from bounds import disk_speed, forget_all, weight_files
from layer_major import entries, read_bytes
from make_checkpoint import shapes_of
from torch.nn import functional

from prunecli.model.checkpoint import open_model
from prunecli.modules.dequantised import as_run
from prunecli.modules.filling import Staging, read_into
from prunecli.modules.fitting import candidates, dtype_name
from prunecli.tensors.dtypes import itemsize
from prunecli.tensors.quantities import parse_size

BLOCK = 128
"""Rows and columns that share a scale."""

SHARD_BYTES = 4_000_000_000
POOL = 1 << 24
"""Random bytes that all tensors are cut from."""

WORDS = 4096
TIMED_LAYERS = 3
HEAD_DIM, HEADS, KEY_HEADS, TOP_K = 128, 16, 4, 8


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """Qwen3-235B-A22B's config.json but for the widths: the experts' is what `--size` leaves."""
    size = 1 if options.fp8 else 2
    per_unit = options.layers * options.experts * 3 * options.width * size
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "decoder_sparse_step": 1,
        "eos_token_id": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": options.width,
        "initializer_range": 0.02,
        "intermediate_size": 3 * options.width,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": max(BLOCK, parse_size(options.size) // per_unit // BLOCK * BLOCK),
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": options.experts,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": options.layers,
        "num_key_value_heads": KEY_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    if options.fp8:
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.{n}.mlp.gate" for n in range(options.layers)),
            ],
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return config


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape of what is stored."""
    found = {}
    for name, shape in shapes_of(config).items():
        is_plain = len(shape) < 2 or name.endswith((".gate.weight", "embed_tokens.weight", "lm_head.weight"))
        if "quantization_config" not in config or is_plain:
            found[name] = ("BF16", shape)
            continue
        found[name] = ("F8_E4M3", shape)
        found[f"{name}_scale_inv"] = ("BF16", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
    return found


class Values:
    """Bytes of any tensor, cut from pools.

    Weights have the standard deviation 0.02, embeddings 1, so that tokens differ in all layers and every expert gets
    some.
    """

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        drawn = draw.standard_normal(POOL, dtype=np.float32)
        self._pools = {
            "weight": (drawn * np.float32(0.02)).astype(ml_dtypes.bfloat16),
            "float8": (drawn * np.float32(64)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn),
            "scale": (draw.random(POOL, dtype=np.float32) * 2e-4 + 2e-4).astype(ml_dtypes.bfloat16),
            "embed": drawn.astype(ml_dtypes.bfloat16),
            "norm": (1 + drawn * np.float32(0.02)).astype(ml_dtypes.bfloat16),
        }
        self._number = 0

    def pieces(self, name: str, dtype: str, count: int) -> Iterator[memoryview]:
        """`count` values."""
        kind = next((kind for kind in ("scale", "embed", "norm") if kind in name), "weight")
        pool = self._pools["float8" if dtype == "F8_E4M3" else kind]
        self._number += 1
        start = self._number * 7919 * 64 % POOL
        while count:
            piece = pool[start : start + count]
            yield piece.view(np.uint8).data
            count, start = count - len(piece), 0


def make(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write checkpoint and tokenizer."""
    directory.mkdir(parents=True)
    tensors, values = tensors_of(config), Values(seed)
    nbytes = {name: math.prod(shape) * itemsize(dtype) for name, (dtype, shape) in tensors.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in nbytes.items():
        if filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            dtype, shape = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + nbytes[name]]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                for piece in values.pieces(name, tensors[name][0], math.prod(tensors[name][1])):
                    opened.write(piece)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2} | {f"w{number}": number + 3 for number in range(WORDS)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def run(command: list[str], threads: int) -> runs.Ran:
    return runs.run(command, {"OMP_NUM_THREADS": str(threads)})


def collecting(options: argparse.Namespace, model: Path, gates: Path, processes: int = 1) -> list[str]:
    """The command `collect-gates` of the text."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    python, *module = runs.PRUNECLI
    return [
        *(python, *(launcher if processes > 1 else []), *module, "collect-gates", str(model)),
        *("--text", f"words={options.work / 'words.txt'}", "--memory", options.memory, "--device", "cpu"),
        *("--context", str(options.context), "--batch-tokens", str(options.batch_tokens), "-o", str(gates)),
    ]


def collect(options: argparse.Namespace, model: Path, gates: Path, processes: int = 1) -> runs.Ran:
    """`collect-gates` of the text, from a page cache that was asked to forget the weights."""
    forget_all(model)
    command = collecting(options, model, gates, processes)
    return run([*command, "--force"], max(1, options.threads // processes))


def products_seconds(
    options: argparse.Namespace, config: Mapping[str, Any], dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds, and of the processor, that the layers' products take; measured on `TIMED_LAYERS` layers."""
    torch.set_default_dtype(dtype)
    width, ffn, count = config["hidden_size"], config["moe_intermediate_size"], options.tokens
    queries, keys = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
    dense = [torch.randn(rows, width) for rows in (queries, keys, keys, config["num_experts"])]
    dense.append(torch.randn(width, queries))
    held = min(64, options.experts)
    up, down = torch.randn(held, 2 * ffn, width), torch.randn(held, width, ffn)
    share = max(1, round(count * TOP_K / options.experts))
    hidden = torch.randn(max(count, share), width)
    inner, wide = torch.randn(share, ffn), torch.randn(count, queries)

    def layer() -> None:
        for start in range(0, count, options.batch_tokens):  # as batches go through the attention
            end = min(count, start + options.batch_tokens)
            for weight in dense:
                given = hidden[start:end] if weight.shape[1] == width else wide[start:end]
                functional.linear(given, weight)
            windows = max(1, (end - start) // options.context)
            heads = torch.empty(windows, HEADS, min(options.context, end - start), HEAD_DIM)
            functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        for expert in range(options.experts):
            functional.linear(hidden[:share], up[expert % held])
            functional.linear(inner, down[expert % held])

    with torch.inference_mode():
        layer()
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(TIMED_LAYERS):
            layer()
        factor = options.layers / TIMED_LAYERS
        took = (time.perf_counter() - start) * factor, (time.process_time() - busy) * factor
    torch.set_default_dtype(torch.float32)
    return took


def placing_seconds(model: Path, config: Mapping[str, Any], dtype: torch.dtype) -> float:
    """What one thread takes to have all layers' weights in `dtype`, out of the page cache; measured on one layer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = as_run(open_model(model), dtype)
    names = [name for name in run.tensors if name.startswith("model.layers.0.")]
    staging = Staging()
    place = torch.empty(max(run.info(name).numel for name in names), dtype=dtype)
    for _ in range(2):
        start = time.perf_counter()
        for name in names:
            info = run.info(name)
            read_into(place[: info.numel].view(info.shape), run, name, staging)
        seconds = time.perf_counter() - start  # of the second time
    torch.set_num_threads(threads)
    return seconds * int(config["num_hidden_layers"])


def report_collect(options: argparse.Namespace, model: Path, config: Mapping[str, Any]) -> None:
    """Time against both baselines, taken before and after."""
    stored = sum(file.stat().st_size for file in weight_files(model))
    dtype = candidates("auto", [open_model(model)], torch.device("cpu"))[0]
    products = [products_seconds(options, config, dtype)]
    rate = disk_speed(model, stored)
    ran = collect(options, model, options.work / "gates.json")
    products.append(products_seconds(options, config, dtype))
    placing = placing_seconds(model, config, dtype)
    multiplying, busy = (statistics.mean(column) for column in zip(*products, strict=True))
    larger = max(stored / rate, multiplying)
    print(ran.said.strip())
    print(
        f"collect-gates of {options.tokens} tokens: {ran.seconds:.1f} s, {ran.seconds / larger:.2f} of the larger; "
        f"{ran.processor:.1f} s of the processor; peak {ran.peak / 2**30:.2f} GiB of {options.memory}"
    )
    print(
        f"  reading the files: {stored / 2**30:.2f} GiB, {stored / rate:.1f} s, "
        f"{rate / 2**30:.2f} GiB a second; of these {read_bytes(ran.said) / stored:.3f} were read"
    )
    each = ", ".join(f"{seconds:.1f}" for seconds, _ in products)
    print(
        f"  products alone, {dtype_name(dtype)}: {multiplying:.1f} s ({each}), {busy:.1f} s of the processor"
    )
    print(
        f"  a thread that reads and decodes or casts what is in the page cache: {placing:.1f} s", flush=True
    )


def report_resume(options: argparse.Namespace, model: Path) -> None:
    """Killed and started again."""
    gates = options.work / "resumed.json"
    kept = gates.with_name(f".{gates.name}.layers")
    forget_all(model)
    start = time.perf_counter()
    process = subprocess.Popen(
        collecting(options, model, gates),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
    )
    while process.poll() is None and not kept.exists():
        time.sleep(0.1)
    time.sleep(options.after)
    if process.poll() is not None:
        print("resume: the run was over before its states were kept")
        return
    process.kill()
    process.wait()
    killed = time.perf_counter() - start
    ran = run(collecting(options, model, gates), options.threads)
    whole = options.work / "gates.json"
    same = agreement(gates, whole)
    print(f"killed after {killed:.1f} s, the rest took {ran.seconds:.1f} s; {same}", flush=True)


def agreement(gates: Path, other: Path) -> str:
    """How far two files' statistics are from each other."""
    if not other.exists():
        return "not compared"
    if entries(gates) == entries(other):
        return "statistics equal"
    mine, theirs = (np.array(list(numbers(entries(path)))) for path in (gates, other))
    largest = np.abs(mine - theirs).max() / np.abs(theirs).max() if mine.shape == theirs.shape else math.nan
    return f"statistics differ by up to {largest:.1e} of the largest"


def numbers(tree: Any) -> Iterator[float]:
    """Those of a JSON value."""
    if isinstance(tree, int | float):
        yield tree
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(value)


def report_processes(options: argparse.Namespace, model: Path) -> None:
    """Two processes; products of one thread are not those of two, to the last bit."""
    gates, whole = options.work / "two.json", options.work / "gates.json"
    ran = collect(options, model, gates, 2)
    same = agreement(gates, whole)
    read = re.findall(r"[\d.]+ \w+ of weights", ran.said)
    print(
        f"two processes: {ran.seconds:.1f} s, {ran.processor:.1f} s of the processor, peak of the larger "
        f"{ran.peak / 2**30:.2f} GiB, {', '.join(read)}; {same}",
        flush=True,
    )


def report_prune(options: argparse.Namespace, model: Path) -> None:
    """By turns with `cp` of as many bytes of the same files; both begin with a page cache that forgot them."""
    output, gates = options.work / "out", options.work / "gates.json"
    command = [*runs.PRUNECLI, "prune-experts", str(model), "--ratio", str(options.ratio)]
    command += ["--gates", str(gates)] if gates.exists() else ["--metric", "random"]
    prune = [*command, "--quiet", "-o", str(output)]
    pruning: list[tuple[float, float]] = []
    copying: list[tuple[float, float]] = []
    peak = kept = 0
    for _ in range(options.rounds):
        times, used = written(options, model, prune, output)
        pruning.append(times)
        peak = max(peak, used)
        kept = sum(path.stat().st_size for path in weight_files(output))
        shutil.rmtree(output)
        output.mkdir()
        copying.append(written(options, model, copy_command(model, output, kept), output)[0])
        shutil.rmtree(output)
    for name, found in (("prune-experts", pruning), ("cp", copying)):
        ended = ", ".join(f"{seconds:.1f} s ({synced:.1f} with sync)" for seconds, synced in found)
        print(f"{name} of {kept / 2**30:.2f} GiB: {ended}")
    ratios = [
        statistics.median(one[place] / other[place] for one, other in zip(pruning, copying, strict=True))
        for place in (0, 1)
    ]
    print(
        f"prune-experts --ratio {options.ratio} / cp: {ratios[0]:.2f}, with sync {ratios[1]:.2f} "
        f"(median of {options.rounds} rounds); peak {peak / 2**20:.0f} MiB resident",
        flush=True,
    )


def written(
    options: argparse.Namespace, model: Path, command: list[str], output: Path
) -> tuple[tuple[float, float], int]:
    """Seconds until the command ends and until the disk has it all; peak resident bytes."""
    forget_all(model)
    ran = run(command, options.threads)
    start = time.perf_counter()
    subprocess.run(["sync", "-f", str(output)], check=True)
    return (ran.seconds, ran.seconds + time.perf_counter() - start), ran.peak


def copy_command(model: Path, output: Path, nbytes: int) -> list[str]:
    """Copies whole files and a part of one, `nbytes` in all."""
    whole: list[str] = []
    left = nbytes
    for file in weight_files(model):
        if file.stat().st_size > left:
            rest = f"head -c {left} '{file}' > '{output / file.name}'"
            return ["bash", "-c", "; ".join([*whole, rest])]
        whole.append(f"cp '{file}' '{output}'")
        left -= file.stat().st_size
    raise AssertionError("more was kept than there is")


def main() -> None:
    """Make, run the parts, delete."""
    options = parse()
    torch.set_num_threads(options.threads)
    config, model = config_of(options), options.work / "model"
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        if not (model / "config.json").exists():
            start = time.perf_counter()
            make(model, config, options.seed)
            print(f"made in {time.perf_counter() - start:.0f} s", flush=True)
        draw = np.random.default_rng(options.seed)
        words = " ".join(f"w{number}" for number in draw.integers(0, WORDS, options.tokens))
        (options.work / "words.txt").write_text(words + "\n")
        for part in options.parts.split(","):
            if part == "collect":
                report_collect(options, model, config)
            elif part == "resume":
                report_resume(options, model)
            elif part == "processes":
                report_processes(options, model)
            elif part == "prune":
                report_prune(options, model)
    finally:
        if not options.keep:
            shutil.rmtree(options.work)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = runs.parser(__doc__)
    parser.add_argument("work", type=Path, help="folder on the disk to measure")
    parser.add_argument("--size", default="40GB", help="of the experts")
    parser.add_argument("--fp8", action="store_true", help="in FP8 instead of bfloat16")
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024, help="of the model; Qwen3-235B-A22B has 4096")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ratio", type=float, default=0.5, help="fraction of the experts to remove")
    parser.add_argument("--rounds", type=int, default=3, help="of prune-experts and cp")
    parser.add_argument("--after", type=float, default=5.0, help="seconds from the kept states to the kill")
    parser.add_argument("--parts", default="collect,resume,processes,prune", help="what to measure")
    parser.add_argument("--keep", action="store_true", help="do not delete the folder")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
