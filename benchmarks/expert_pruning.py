"""What expert pruning costs: chrF++ by ratio, granularity and balance, averaged over all pairs of a model's languages.

    python benchmarks/expert_pruning.py MODEL DATA --gates gates.json --split test --ratios 0.5,0.8

One model is loaded once; a selection is applied by masking the router logits of the pruned experts, which gives the
outputs of the pruned checkpoint (tests/contracts holds the two equal) without writing hundreds of checkpoints.
"""

from __future__ import annotations

import json
import statistics as stats
import time
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import runs
import torch

from prunecli.evaluation.decoding import DecodingOptions, translate
from prunecli.evaluation.scoring import make_metrics, score
from prunecli.methods.experts.metrics import aggregate, metric_values
from prunecli.methods.experts.options import SCOPES
from prunecli.methods.options import parse_balance
from prunecli.methods.units import drawn
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import open_model
from prunecli.model.find_axes import axes_of
from prunecli.modules.loading import load_model, sparse_ffns
from prunecli.results.gates import GateStatistics, read_gates
from prunecli.selection import select as selection
from prunecli.selection.select import Budget, Kept
from prunecli.text.parallel import ParallelText, read_parallel
from prunecli.text.tokens import load_tokenizer


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    axes = axes_of(open_model(options.model), "expert")
    gates = read_gates(options.gates)
    text = read_parallel(options.data, options.split).first(options.sentences)
    pairs = [(a, b) for a in text.languages for b in text.languages if a != b]
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    rows = []
    for name, ratio, granularity, balance in settings(options):
        start, scores = time.monotonic(), []
        for pair in pairs:
            kept = select(axes, gates, pair, ratio, granularity, balance, options)
            mask(sparse_ffns(model), kept)
            made = translate(
                model,
                tokenizer,
                text.sentences[pair[0]],
                pair,
                DecodingOptions(options.beam, max_new_tokens=options.max_new_tokens),
            )
            scores.append(score(made, text.sentences[pair[1]], make_metrics(None)))
        row = {
            "setting": name,
            "chrF++": stats.mean(s["chrf++"] for s in scores),
            "BLEU": stats.mean(s["bleu"] for s in scores),
            "length_ratio": stats.mean(s["length_ratio"] for s in scores),
            "over_generated": stats.mean(s["over_generated"] for s in scores),
            "pairs": {"-".join(p): s["chrf++"] for p, s in zip(pairs, scores, strict=True)},
            "seconds": time.monotonic() - start,
        }
        rows.append(row)
        print(
            "  ".join(
                f"{v:8.3f}" if isinstance(v, float) else f"{v:36}" for k, v in row.items() if k != "pairs"
            ),
            flush=True,
        )
    overlap(axes, gates, text, options)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def parse() -> Any:
    parser = runs.parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--gates", type=Path, default=Path("gates.json"))
    parser.add_argument("--split", default="test")
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--ratios", type=lambda t: [float(x) for x in t.split(",")], default=[0.5, 0.75, 0.8])
    parser.add_argument(
        "--granularities", type=lambda t: t.split(","), default=["language", "pair", "global", "random"]
    )
    parser.add_argument("--balances", type=lambda t: t.split(","), default=["1:1", "3:1"])
    parser.add_argument("--strategy", default="per-layer")
    parser.add_argument("--metric", default="importance")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args()


def settings(options: Any) -> Iterator[tuple[str, float, str, Fraction]]:
    """Name, ratio, granularity and balance of every row; the full model first."""
    yield "full", 0.0, "global", Fraction(1)
    for ratio in options.ratios:
        for granularity in options.granularities:
            for balance in options.balances:
                yield f"{ratio:.0%} {granularity} {balance}", ratio, granularity, parse_balance(balance)


def select(
    axes: Sequence[Axis],
    gates: GateStatistics,
    pair: tuple[str, str],
    ratio: float,
    granularity: str,
    balance: Fraction,
    options: Any,
) -> Kept:
    """Name of the axis -> ids that stay for `pair`."""
    if granularity == "random":
        values = drawn(axes, options.seed).values
    else:
        languages = ((), ()) if granularity == "global" else ((pair[0],), (pair[1],))
        values = metric_values(options.metric, aggregate(gates, granularity, *languages), gates)
    budget = Budget(ratio, scope=SCOPES[options.strategy], balance=balance, least=2)
    return selection.select(axes, values, budget)[0]


def mask(modules: Mapping[str, Any], kept: Kept) -> None:
    """Let the routers choose among the kept experts only."""
    for name, module in modules.items():
        router = module.router["classifier"]
        router.forward = partial(_among, router, list(kept[f"{name}.experts"]))


def _among(router: Any, experts: list[int], tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = type(router).forward(router, tokens)
    return torch.full_like(logits, -torch.inf).index_copy(1, torch.tensor(experts), logits[:, experts])


def overlap(axes: Sequence[Axis], gates: GateStatistics, text: ParallelText, options: Any) -> None:
    """Print which experts each language keeps at the highest ratio, balanced, as source and as target."""
    ratio = max(options.ratios)
    for language in text.languages:
        other = next(name for name in text.languages if name != language)
        for side, pair in (("encoder", (language, other)), ("decoder", (other, language))):
            kept = select(axes, gates, pair, ratio, "language", Fraction(1), options)
            named = {axis.layer: kept[axis.name] for axis in axes if axis.side == side}
            print(
                f"{language} {side}: "
                + "; ".join(f"layer {i}: {' '.join(map(str, ids))}" for i, ids in named.items())
            )


if __name__ == "__main__":
    main()
