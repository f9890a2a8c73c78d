"""How much faster a model of BERT-base's shape is without half of its heads (1905.10650, Table 4).

    python benchmarks/head_pruning.py --ratio 0.5 --batch-sizes 1,4,16,64

A checkpoint of random weights is written to a temporary directory and pruned by prunecli at random; both are run on
random tokens in turn, so that drift hits them alike. The paper saw up to 17.5 % more examples per
second, at large batches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import runs
import torch

from prunecli.methods.options import HeadOptions
from prunecli.methods.plans import plan_heads
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.pipeline import apply
from prunecli.selection.cut import cut


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        full = write_bert(Path(folder) / "full")
        pruned = prune(full, Path(folder) / "pruned", options.ratio)
        models = {"full": load(full, options), "pruned": load(pruned, options)}
    print(
        f"BERT-base, {options.ratio:.0%} of the heads removed, {options.length} tokens, {options.threads} threads"
    )
    for batch in options.batch_sizes:
        rates = measure(models, batch, options)
        print(
            f"batch {batch:3}: {rates['full']:8.2f} -> {rates['pruned']:8.2f} examples/s, "
            f"{rates['pruned'] / rates['full'] - 1:+.1%} (median of {options.runs})"
        )


def write_bert(directory: Path) -> Path:
    """A stock BERT-base with a classification head, random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(num_labels=3)).save_pretrained(directory)
    return directory


def prune(source: Path, output: Path, ratio: float) -> Path:
    """Remove this fraction of the heads, drawn at random."""
    checkpoint = open_model(source)
    plan = plan_heads(checkpoint, HeadOptions(metric="random", ratio=ratio))
    rewrite = cut(checkpoint, plan)
    apply(checkpoint, rewrite, output)
    held = json.loads((output / "config.json").read_text())["prunecli"]["axes"]
    print(f"heads left in the layers that lost some: {[len(units['kept']) for units in held.values()]}")
    return output


def load(path: Path, options: argparse.Namespace) -> Any:
    return load_model(path, device=options.device, dtype=options.dtype)


def measure(models: dict[str, Any], batch: int, options: argparse.Namespace) -> dict[str, float]:
    """Examples per second of each model."""
    ids = torch.randint(1000, 30000, (batch, options.length), generator=torch.Generator().manual_seed(0))

    def forward(model: Any) -> None:
        with torch.inference_mode():
            model(ids.to(model.device)).logits.sum().item()

    turns = runs.in_turns({name: partial(forward, model) for name, model in models.items()}, options.runs)
    return {name: batch / runs.median(own) for name, own in turns.items()}


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--batch-sizes", type=runs.numbers, default=[1, 4, 16, 64])
    parser.add_argument("--length", type=int, default=128, help="tokens of an example")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


if __name__ == "__main__":
    main()
