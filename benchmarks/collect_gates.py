"""What counting costs: `collect-gates` in forced mode against the same forward passes without observers.

python benchmarks/collect_gates.py MODEL DATA --split val --sentences 200
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import runs
import torch

from prunecli.methods.experts.batches import GateObserver, Translation
from prunecli.methods.experts.collect import score
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.running.runner import InMemory
from prunecli.text.parallel import parse_pairs, read_parallel
from prunecli.text.tokens import load_tokenizer


@contextmanager
def unobserved(_observer: GateObserver, _model: Any) -> Iterator[None]:
    """No hooks: nothing is seen."""
    yield


def main() -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", default="val")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--pairs", nargs="+")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    text = read_parallel(options.data, options.split).first(options.sentences)
    pairs = parse_pairs(options.pairs, None, text.languages)
    checkpoint = open_model(options.model)
    runner, tokenizer = InMemory(load_model(options.model)), load_tokenizer(options.model)

    def observed() -> None:
        score(runner, checkpoint, tokenizer, Translation(text, pairs))

    plain = patch.object(GateObserver, "watching", unobserved)(observed)
    turns = runs.in_turns({"without": plain, "with": observed}, options.rounds)
    medians = {name: runs.median(own) for name, own in turns.items()}
    print(
        f"{len(text)} sentences, {len(pairs)} pairs, {options.threads} threads, median of {options.rounds} rounds"
    )
    print(f"without statistics {medians['without']:.2f} s, with {medians['with']:.2f} s: ", end="")
    print(f"{medians['with'] / medians['without']:.3f}x")


if __name__ == "__main__":
    main()
