"""Compare `shrink` with each single kind of units, the same share of all kinds, and random units, at equal parameters.

python benchmarks/shrink.py MODEL… --text FILE [--data DIR --pairs A-B] [--labelled FILE] [--params 0.75,0.5]
    [--score-tokens 16384] [--trial-tokens 4096] [--trials 8] [--only layers,units]

Every row is measured on the part of the text that nothing was chosen by. Random units are drawn with the shares of
shrink's mixture; tokens are never drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from prunecli.evaluation.quality_check import Measurer
from prunecli.model.checkpoint import open_model
from prunecli.pipeline import apply
from prunecli.progress import silent
from prunecli.results.shrinking import Tried
from prunecli.shrinking.options import ShrinkOptions
from prunecli.shrinking.shrink import Shrinking
from prunecli.text.choice import TextChoice


def rows(model: Path, choice: TextChoice, options: ShrinkOptions) -> Iterator[dict[str, object]]:
    """Yield the original, shrink's mixture, and what it is compared with."""
    source = open_model(model)
    run = Shrinking(source, choice, options, None, silent, lambda line: print(line, file=sys.stderr))
    best, tried = run.search()
    measurer = Measurer(source, run.closing, "auto", silent)
    yield {"model": model.name, "mixture": "original", **measurer.original.to_json()}
    for name, one, metrics in mixtures(best, tried):
        with TemporaryDirectory() as folder:
            sizes = apply(source, run.rewrite(one.shares, metrics), Path(folder) / "cut").summary
            quality = measurer.measure(Path(folder) / "cut", name, same_tokens="tokens" not in one.shares)
        yield {
            "model": model.name,
            "mixture": name,
            "parameters": round(sizes.parameters_after / sizes.parameters_before, 4),
            "shares": one.shares,
            "metrics": dict(metrics),
            **quality.to_json(),
        }


def mixtures(best: Tried, tried: list[Tried]) -> Iterator[tuple[str, Tried, Mapping[str, str]]]:
    """Yield name, shares and metrics of each mixture."""
    yield "shrink", best, best.metrics
    whole = [one for one in tried if one.stage == "whole" and one.parameters <= best.parameters * 1.02]
    for one in whole:
        if len(one.shares) == 1:
            yield f"{next(iter(one.shares))} alone", one, one.metrics
    most = max(whole, key=lambda one: (len(one.shares), -max(one.shares.values())))
    yield "even shares", most, most.metrics
    if "tokens" not in best.shares:
        yield "random", best, dict.fromkeys(best.metrics, "random")


def main() -> None:
    """Print a line of JSON for each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    for name in ("text", "data", "labelled"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("pairs", "only"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--params", default="0.75,0.5")
    for name, default in (("score-tokens", 16384), ("trial-tokens", 4096), ("trials", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    text = {"files": given.text, "data": given.data, "pairs": given.pairs, "labelled": given.labelled}
    choice = TextChoice(**{name: value for name, value in text.items() if value})
    for model in given.models:
        for params in given.params.split(","):
            options = ShrinkOptions(
                params=float(params),
                score_tokens=given.score_tokens,
                trial_tokens=given.trial_tokens,
                trials=given.trials,
                **({"only": given.only} if given.only else {}),
            )
            for row in rows(model, choice, options):
                print(json.dumps({"params": float(params), **row}), flush=True)


if __name__ == "__main__":
    main()
