"""Seconds and peak memory of fitting a DeFINE unit to a random table that lies in a file, and what the fit is worth.

    python benchmarks/fit_define.py --rows 256000 --width 1024 --map-dim 128 --expand-dim 1024

The table's rows are mixtures of a few random directions of falling strength, bent by a nonlinearity: a falling
spectrum with structure that a linear projection misses. Peak memory is that of the whole process beyond what it held
before the fit; the table alone takes rows x width x 2 bytes on the disk.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import runs
import torch

from prunecli.methods.embeddings.fit import fit_define
from prunecli.methods.embeddings.table import Table
from prunecli.model.define import UNIT_KINDS, UnitShape


def write_table(path: Path, rows: int, width: int, hidden: int, seed: int = 0) -> np.memmap:
    """A float16 table of `rows` x `width` values on the disk."""
    rng = np.random.default_rng(seed)
    strengths = np.arange(1, hidden + 1) ** -0.5
    inner = rng.standard_normal((hidden, width), np.float32) / hidden**0.5
    outer = rng.standard_normal((width, width), np.float32) / width**0.5
    table = np.lib.format.open_memmap(path, "w+", np.float16, (rows, width))
    for start in range(0, rows, 4096):
        stop = min(start + 4096, rows)
        sources = (rng.standard_normal((stop - start, hidden)) * strengths).astype(np.float32)
        bent = np.tanh(6 * sources @ inner) @ outer
        table[start:stop] = bent + 0.1 * rng.standard_normal(bent.shape, np.float32)
    table.flush()
    return table


def main() -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--rows", type=int, default=64_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256, help="directions that the rows are mixtures of")
    parser.add_argument("--map-dim", type=int, default=128)
    parser.add_argument("--expand-dim", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--max-groups", type=int, default=4)
    parser.add_argument("--kind", choices=UNIT_KINDS, default="define")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = UnitShape(
        options.rows,
        options.map_dim,
        options.width,
        options.expand_dim,
        options.depth,
        options.max_groups,
        options.kind,
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "table.npy"
        write_table(path, options.rows, options.width, options.hidden)
        array = np.load(path, mmap_mode="r")
        table = Table(options.rows, options.width, lambda start, stop: array[start:stop])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began, worked = time.perf_counter(), time.process_time()
        fit = fit_define(table, shape, epochs=options.epochs)
        seconds, worked = time.perf_counter() - began, time.process_time() - worked
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{shape}, {options.threads} threads")
    print(f"{seconds:.1f} s ({worked:.1f} s of processor time), {peak / 2**20:.2f} GiB more memory at most")
    print(f"parameters {shape.table_parameters:,} -> {fit.parameters_after:,} ", end="")
    print(f"(projective {fit.baseline_parameters:,})")
    for name, quality in (("projective", fit.baseline), ("start", fit.start), ("fitted", fit.quality)):
        print(f"{name:>10}: explained variance {quality.explained_variance:.4f}, ", end="")
        print(f"mean cosine {quality.mean_cosine:.4f}")


if __name__ == "__main__":
    main()
