"""What layer-major running costs: `collect-gates --memory` against the disk and against matrix products.

    python benchmarks/make_checkpoint.py /data/moe --layers 24 --experts 128
    python benchmarks/layer_major.py /data/moe --memory 4GiB

Printed: the peak resident memory of the whole process, its time, the bytes read; and the larger of the time that the
disk takes for these bytes and the time that matrix products of these sizes take, both measured here and now, the
products for as long as --products-seconds before and after. On a machine that does other work too, the processor time
of the whole process against that of the products says more. With --whole, also the time of a run in memory. Without
--data, the text is the bundled demo's, repeated. The page cache is asked to forget the checkpoint before each part
that reads it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import runs
import torch
from bounds import disk_speed, forget_all, product_speed

from prunecli import demo
from prunecli.model.checkpoint import Checkpoint, open_model


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or repeated_demo(Path(folder), options.sentences)
        gates = Path(folder) / "gates.json"
        speeds = [matrix_speeds(options.products_seconds)]
        seconds, busy, peak, _, said = collect(options, data, gates, "--memory", options.memory)
        speeds.append(matrix_speeds(options.products_seconds))
        read = read_bytes(said)
        flops = pass_flops(open_model(options.checkpoint), json.loads(gates.read_text()))
        if options.whole:
            whole = collect(options, data, gates.with_name("whole.json"))
            equal = entries(gates) == entries(gates.with_name("whole.json"))
            print(f"in memory: {whole.seconds:.0f} s, {whole.peak / 2**30:.2f} GiB; ", end="")
            print(f"by layer / in memory: {seconds / whole.seconds:.2f}, ", end="")
            print(f"of processor time {busy / whole.processor:.2f}, ", end="")
            print(f"statistics {'equal' if equal else 'NOT EQUAL'}")
    rate = disk_speed(options.checkpoint, options.disk_bytes)
    speed, share = (sum(values) / len(values) for values in zip(*speeds, strict=True))
    disk, products = read / rate, flops / speed
    print(said.strip())
    print(f"peak resident {peak / 2**30:.2f} GiB of {options.memory}, {seconds:.0f} s in all")
    print(f"disk: {read / 2**30:.2f} GiB at {rate / 2**30:.2f} GiB/s take {disk:.0f} s")
    print(f"products: {flops / 1e12:.1f} TFLOP at {speed / 1e9:.0f} GFLOPS take {products:.0f} s")
    print(f"time / the larger: {seconds / max(disk, products):.2f}")
    print(f"processor time: {busy:.0f} s; products alone: {flops / share:.0f} s, {busy * share / flops:.2f}")


def collect(options: argparse.Namespace, data: Path, gates: Path, *more: str) -> runs.Ran:
    """Run `collect-gates`, from a page cache that was asked to forget the weights."""
    command = [*runs.PRUNECLI, "collect-gates", options.checkpoint, "--data", data]
    command += ["--split", options.split, "--compute-dtype", options.dtype, *more]
    command += ["--batch-tokens", options.batch_tokens, "-o", gates, "--device", "cpu"]
    command += ["--pairs", options.pairs] if options.pairs else []
    forget_all(options.checkpoint)
    return runs.run(command, {"OMP_NUM_THREADS": str(options.threads)})


def read_bytes(said: str) -> int:
    """The bytes of weights that the command says it read."""
    found = re.search(r"([\d.]+) (B|KiB|MiB|GiB) of weights", said)
    if found is None:
        sys.exit(said)
    return int(float(found[1]) * 1024 ** ("B", "KiB", "MiB", "GiB").index(found[2]))


def pass_flops(checkpoint: Checkpoint, gates: dict) -> int:  # type: ignore[type-arg]
    """Floating-point operations of the layers' matrix products for the tokens that the statistics count."""
    sources: dict[str, int] = {}
    tokens = Counter[str]()
    for pair, entry in gates["entries"].items():
        first = {layer.split(".")[1]: n for layer, n in zip(gates["layers"], entry["tokens"], strict=True)}
        sources[pair.split("-")[0]] = first["encoder"]
        tokens.update(cross=first["encoder"], decoder=first["decoder"])
    tokens["encoder"] = sum(sources.values())  # a source that serves several pairs is encoded once
    done = 0.0
    for name, shape in checkpoint.layout.shapes.items():
        if ".layers." in name and len(shape) == 2:
            chosen = gates["top_k"] / gates["num_experts"] if ".experts." in name else 1
            side = "cross" if re.search(r"cross_attention\.[kv]_proj", name) else name.split(".")[1]
            done += 2 * math.prod(shape) * chosen * tokens[side]
    return round(done)


def matrix_speeds(seconds: float) -> tuple[float, float]:
    """Operations a second, and a second of processor time, of products of 512 rows by 1024 x 4096."""
    start, busy = time.perf_counter(), time.process_time()
    speed = product_speed(1024, 4096, seconds)
    return speed, speed * (time.perf_counter() - start) / (time.process_time() - busy)


def entries(gates: Path) -> object:
    return json.loads(gates.read_text())["entries"]


def repeated_demo(folder: Path, sentences: int) -> Path:
    """The bundled text of two languages, its sentences joined in threes and repeated."""
    for file in sorted(demo.DATA.glob("val.*"))[:2]:
        lines = file.read_text(encoding="utf-8").splitlines()
        joined = [" ".join(lines[(3 * i + j) % len(lines)] for j in range(3)) for i in range(sentences)]
        (folder / file.name).write_text("\n".join(joined) + "\n", encoding="utf-8")
    return folder


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--pairs")
    parser.add_argument("--sentences", type=int, default=997, help="of the demo's text")
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--whole", action="store_true", help="also run with the model in memory")
    parser.add_argument("--products-seconds", type=float, default=5.0, help="to measure products")
    parser.add_argument("--disk-bytes", type=int, default=8 << 30, help="read at most to measure the disk")
    return parser.parse_args()


if __name__ == "__main__":
    main()
