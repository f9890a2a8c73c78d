"""Runs the benchmarks one after another and prints the table of docs/background/performance.md, beside the goals.

    python benchmarks/table.py MODEL DATA --pair eng_Latn-deu_Latn --work /data/scratch

MODEL is a translation mixture of experts, DATA its text; checkpoints of random weights are made in --work (20 GB, and
deleted again). Takes about half an hour; nothing else should run. Everything that the scripts print goes to --log.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import runs

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        what: is measured.
        pattern: of the figures in what the script prints.
        measured: how they are written: a template of the pattern's groups, from {0} on.
        asked: the bound.
    """

    what: str
    pattern: str
    measured: str
    asked: str = ""


@dataclass(frozen=True)
class Benchmark:
    """A script with its arguments, in which {model}, {data}, {pair}, {work} are filled in.

    Attributes:
        arguments: of the script.
        rows: of the table.
        made: name -> arguments of `make_checkpoint.py`, of the checkpoints in {work} that it reads.
    """

    arguments: Sequence[str]
    rows: Sequence[Row]
    made: Mapping[str, Sequence[str]]


def benchmark(command: str, *rows: Row, **made: str) -> Benchmark:
    return Benchmark(command.split(), rows, {name: arguments.split() for name, arguments in made.items()})


SPARSE = r"{} +{} tokens, ms: .*?ours ([\d.]+).*ours/limit ([\d.]+)"
PRUNED = (
    r"{}: ([\d.]+) GiB kept(?:.|\n)*?prunecli +([\d.]+) s.*peak (\d+) MiB"
    r"(?:.|\n)*?/ cp: ([\d.]+) of the medians, ([\d.]+)"
)
SHARED = r"{}.*?: ([\d.]+) GiB written in ([\d.]+) s.*ratio ([\d.]+)\), peak (\d+) MiB"

BENCHMARKS = (
    benchmark(
        "sparse_ffn.py",
        *(
            Row(
                f"sparse FFN, {dtype}, {tokens} tokens: time / limit",
                SPARSE.format(dtype, tokens),
                "{0} ms, {1}x",
                asked,
            )
            for dtype, tokens, asked in (
                ("float32", 4096, "1.25x"),
                ("bfloat16", 4096, "1.7x"),
                ("float32", 5, "2x"),
                ("bfloat16", 5, "2x"),
            )
        ),
    ),
    benchmark(
        "collect_gates.py {model} {data} --pairs {pair} --sentences 100 --threads 2",
        Row("`collect-gates` with statistics / without", r"with [\d.]+ s: ([\d.]+)x", "{0}x", "1.05x"),
    ),
    benchmark(
        "layer_major.py {work}/moe --memory 2GiB --sentences 150 --threads 2",
        Row(
            "`collect-gates --memory 2GiB` of 2.4 GiB: time / the larger of reading and products",
            r"peak resident ([\d.]+) GiB(?:.|\n)*time / the larger: ([\d.]+)",
            "{1}x, {0} GiB resident",
            "1.5x",
        ),
        moe="--experts 32",
    ),
    benchmark(
        "prune_experts.py {work}/moe --ratio 0.5 --dtype bfloat16",
        Row(
            "`prune-experts` / `cp` of what it keeps",
            PRUNED.format("as stored"),
            "{0} GiB in {1} s, {3}x (the shortest of each {4}x), {2} MiB resident",
            "1.3x, 1 GiB",
        ),
        Row(
            "`prune-experts --dtype bfloat16` / `cp` of the result",
            PRUNED.format("bfloat16"),
            "{1} s, {3}x (the shortest {4}x), {2} MiB resident",
            "1 GiB",
        ),
        moe="--experts 64",
    ),
    benchmark(
        "prune_experts.py {work}/moe --ratio 0.8 --dtype float16 --rounds 3",
        Row(
            "the same of pickled float32 shards, to float16",
            PRUNED.format("float16"),
            "{0} GiB in {1} s, {3}x (the shortest of each {4}x), {2} MiB resident",
            "1 GiB",
        ),
        moe="--experts 64 --dtype float32 --pickled",
    ),
    benchmark(
        "prune_mixture.py {work} --size 8GB --ratio 0.5",
        Row(
            "`prune-experts` of 48 x 128 experts / `cp` of what it keeps",
            PRUNED.format("as stored"),
            "{0} GiB in {1} s, {3}x (the shortest of each {4}x), {2} MiB resident",
            "1.3x, 300 MiB",
        ),
        Row(
            "45,000 tensors, 58 x 256 experts, opened and checked",
            r"opened and checked in ([\d.]+) s, ([\d.]+) s with",
            "{0} s, {1} s with the imports",
            "2 s",
        ),
    ),
    benchmark(
        "stream_experts.py {work} --size 2GB --ratio 0.5",
        Row(
            "`prune-experts --stream` of 1.9 GiB on a hub on loopback / from the directory",
            r"directory +([\d.]+) s(?:.|\n)*streamed +([\d.]+) s, peak +(\d+) MiB, (.+) over the wire, (.+) in the",
            "{1} s and {0} s, {2} MiB resident, {3} over the wire, {4} in the cache",
            "what is kept",
        ),
    ),
    benchmark(
        "collect_texts.py",
        Row(
            "`collect-gates` of a language model / its forward pass",
            r"collect\w*: [\d.]+ s, ([\d.]+)x",
            "{0}x",
            "1.2x",
        ),
    ),
    *(
        benchmark(
            f"large_mixture.py {{work}} --size 8GB --tokens 4096 --threads 2 --parts collect,prune {option}".strip(),
            Row(
                f"94 x 128 experts of 7.5 GiB in {dtype}, `collect-gates --memory 4GiB`: "
                "time / the larger of reading and products",
                r"([\d.]+) s, ([\d.]+) of the larger.*peak ([\d.]+) GiB",
                "{0} s, {1}x, {2} GiB resident",
                "1.3x",
            ),
            Row(
                f"half of these removed, {dtype} / `cp` of what is kept",
                r"/ cp: ([\d.]+), .*peak (\d+) MiB",
                "{0}x, {1} MiB resident",
                "1.2x",
            ),
        )
        for dtype, option in (("bfloat16", ""), ("FP8", "--fp8"))
    ),
    benchmark(
        "beside_ctranslate2.py {work} --ctranslate2-python {ctranslate2}"
        " --batch 1,8,32 --threads 2 --dtypes float32,int8",
        *(
            Row(
                f"dense M2M-100, beam 5, batch {batch}, {dtype}: speed / CTranslate2's",
                rf"batch {batch}, {dtype}: prunecli ([\d.]+) tokens/s.*'s ([\d.]+)",
                "{0} tokens/s, {1}x",
                "1x",
            )
            for dtype in ("float32", "int8")
            for batch in (1, 8, 32)
        ),
    ),
    benchmark(
        "decoding.py {work}/moe --dtype float32",
        Row(
            "decoding, 24 + 24 layers, batch 1, beam 5, float32: time / reading the active weights",
            r"([\d.]+) tokens/s, .*time / limit ([\d.]+)",
            "{0} tokens/s, {1}x",
            "2x",
        ),
        moe="--layers 24 --experts 12",
    ),
    benchmark(
        "evaluate.py {model} --data {data} --split test_2016 --pair {pair} --sentences 400",
        Row("`evaluate`, sentences per second / batches in file order", r"ratio: +([\d.]+)x", "{0}x", "1.5x"),
    ),
    benchmark(
        "score_heads.py {model} {data} --pairs {pair} --sentences 100 --threads 1 --metrics loss",
        Row(
            "`score-heads` by gradient / a plain forward and backward pass",
            r"gradient scoring.*\n +([\d.]+)x",
            "{0}x",
            "1.15x",
        ),
        Row(
            "the same, memory above the model / a training step's",
            r"gradient / training: ([\d.]+)x",
            "{0}x",
            "less",
        ),
        Row(
            "ablation of all heads, loss",
            r"([\d.]+) evaluations instead of (\d+)",
            "{0} evaluations instead of {1}",
            "clearly less",
        ),
    ),
    benchmark(
        "head_pruning.py --batch-sizes 64 --threads 2 --runs 3",
        Row(
            "half of BERT-base's heads removed, batch 64",
            r"batch +64: +([\d.]+) -> +([\d.]+) examples/s, ([-+\d.]+%)",
            "{0} -> {1} examples/s, {2}",
            "faster",
        ),
    ),
    benchmark(
        "share_ffn.py {work}/dense",
        *(
            Row(
                f"`share-ffn --preset {config}` / `cp` of the result",
                SHARED.format(f"--preset {config}"),
                "{0} GiB in {1} s, {2}x, {3} MiB resident",
                "1 GiB",
            )
            for config in ("NoDec", "SharedEncNoDec")
        ),
        dense="--layers 28 --sparse-step 28 --experts 2 --dtype bfloat16",
    ),
    benchmark(
        "ffn_latency.py --configs NoDec,SharedEncNoDec,OneWide",
        *(
            Row(
                f"Transformer Big, batch 1, beam 5, one thread: {config}",
                rf"{config} +([\d.]+) tokens/s, +([-+\d.]+%)",
                "{0} tokens/s, {1}",
                "faster",
            )
            for config in ("NoDec", "SharedEncNoDec", "OneWide")
        ),
    ),
    benchmark(
        "finetune.py {model} --data {data} --pairs {pair} --split val --batch-tokens 1024",
        Row(
            "`finetune` / a bare loop over the same batches, tokens/s",
            r"ratio: +([\d.]+)% by the clock, ([\d.]+)% by the processor",
            "{0} % (processor {1} %)",
            "90 %",
        ),
    ),
    benchmark(
        "fit_define.py --threads 2",
        Row(
            "DeFINE fit of 64,000 x 1,024, n = 128, k = 1,024",
            r"([\d.]+) s \(([\d.]+) s of processor time\), ([\d.]+) GiB",
            "{0} s, {2} GiB",
            "minutes",
        ),
    ),
)


def main() -> None:
    options = parse()
    names = {
        "model": options.model,
        "data": options.data,
        "pair": options.pair,
        "ctranslate2": options.ctranslate2_python,
    }
    options.work.mkdir(parents=True, exist_ok=True)
    print("| what | measured | asked |\n| --- | --- | --- |", flush=True)
    failed = False
    for number, one in enumerate(BENCHMARKS):
        if options.only and not any(part in one.arguments[0] for part in options.only.split(",")):
            continue
        work = options.work / str(number)
        try:
            for name, arguments in one.made.items():
                printed(["make_checkpoint.py", str(work / name), *arguments], options.log)
            command = [part.format(**names, work=work) for part in one.arguments]
            text = printed(command, options.log)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        for row in one.rows:
            found = re.search(row.pattern, text)
            failed |= found is None
            measured = "not measured" if found is None else row.measured.format(*found.groups())
            print(f"| {row.what} | {measured} | {row.asked} |", flush=True)
    sys.exit(failed)


def printed(command: Sequence[str], log: Path) -> str:
    """What a script prints; it is appended to the log too."""
    result = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n{result.stdout}\n")
    return result.stdout


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--pair", required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory with 20 GB of room")
    parser.add_argument(
        "--ctranslate2-python", default=sys.executable, help="an interpreter that has ctranslate2"
    )
    parser.add_argument("--only", metavar="A,B", help="scripts to run, by a part of their names")
    parser.add_argument("--log", type=Path, default=Path("benchmarks.log"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
