"""What `score-heads --memory` and `evaluate --task lm --memory` cost against holding the whole model.

    python benchmarks/make_checkpoint.py /data/llama --family llama --set num_hidden_layers=24 …
    python benchmarks/layer_major_tasks.py /data/llama --memory 1.5GiB --sentences 200

Printed for each command: the peak resident memory of the whole process and its time, both ways, and how far the
results are apart. The text is the bundled demo's, joined and repeated; the page cache is asked to forget the
checkpoint before each run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import runs
from bounds import forget_all
from large_mixture import numbers

from prunecli import demo

COMMANDS = {
    "evaluate": ["--task", "lm"],
    "score-heads": ["--task", "lm", "--metric", "gradient"],
}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        lines = next(iter(sorted(demo.DATA.glob("val.*")))).read_text(encoding="utf-8").splitlines()
        joined = (
            " ".join(lines[(options.join * i + j) % len(lines)] for j in range(options.join))
            for i in range(options.sentences)
        )
        text.write_text("\n".join(joined) + "\n", encoding="utf-8")
        for command in options.command:
            arguments = [command, str(options.checkpoint), *COMMANDS[command], "--text", str(text)]
            arguments += ["--batch-tokens", str(options.batch_tokens), "--device", "cpu", "--quiet"]
            results = [Path(folder) / f"{command}.{number}.json" for number in range(2)]
            whole = run(options, [*arguments, "-o", str(results[0])])
            layers = run(
                options,
                [*arguments, "-o", str(results[1]), "--memory", options.memory, "--spill-dir", folder],
            )
            for way, (seconds, busy, peak) in (("whole", whole), ("by layer", layers)):
                print(f"{command}: {way} {seconds:.1f} s, {busy:.1f} s of processor, {peak / 2**30:.2f} GiB")
            ratios = ", ".join(f"{one / other:.2f}" for one, other in zip(layers, whole, strict=True))
            print(f"{command}: by layer / whole: {ratios}; results differ by {apart(*results):.1e} at most")


def run(options: argparse.Namespace, arguments: list[str]) -> tuple[float, float, int]:
    """Seconds, processor seconds and peak resident bytes."""
    forget_all(options.checkpoint)
    ran = runs.run([*runs.PRUNECLI, *arguments], {"OMP_NUM_THREADS": str(options.threads)})
    return ran.seconds, ran.processor, ran.peak


def apart(one: Path, other: Path) -> float:
    """The largest relative difference of two numbers of the results."""
    one_has, other_has = (numbers(scores(json.loads(path.read_text()))) for path in (one, other))
    return max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in zip(one_has, other_has, strict=True))


def scores(payload: Any) -> Any:
    return payload["values"] if "values" in payload else payload["results"][0]["scores"]


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--command", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--memory", default="1.5GiB")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--sentences", type=int, default=200, help="of the demo's text")
    parser.add_argument("--join", type=int, default=3, help="of the demo's sentences in one")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
