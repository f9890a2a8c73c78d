"""Compare `shrink` with each single kind of units, the same share of all kinds, and random units, at equal parameters.

python benchmarks/shrink.py MODEL… --text FILE [--data DIR --pairs A-B] [--labelled FILE] [--params 0.75,0.5]
    [--score-tokens 16384] [--trial-tokens 4096] [--trials 8] [--only layers,units] [--heal-steps N] [--seeds 3]

Every row is measured on the part of the text that nothing was chosen by, and once more after the same training with the
original as teacher, if --heal-steps is given. Random units are drawn with the shares of shrink's mixture; tokens are
never drawn. A seed is another order of the text: its files begin at another line, so that scores, choice, training and
measurement have other text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import runs

from prunecli.model.checkpoint import open_model
from prunecli.progress import silent
from prunecli.results.rewriting import Tried
from prunecli.shrinking.options import ShrinkOptions
from prunecli.shrinking.shrink import Shrinking
from prunecli.text.choice import TextChoice


def rows(model: Path, choice: TextChoice, options: ShrinkOptions) -> Iterator[dict[str, object]]:
    """Yield shrink's mixture and what it is compared with, each with its quality after cutting and after healing."""
    source = open_model(model)
    run = Shrinking(source, choice, options, None, silent, lambda line: print(line, file=sys.stderr))
    best, tried = run.search()
    most = (options.params or 1.0) * source.total_parameters
    for name, one, metrics in mixtures(best, [one for one in tried if one.parameters <= most]):
        with TemporaryDirectory() as folder:
            _, stages = run.carry_out(
                one.model_copy(update={"metrics": dict(metrics)}), Path(folder) / "made", force=False
            )
        original, *made = stages
        yield {
            "model": model.name,
            "mixture": name,
            "parameters": round((made[0].parameters or 0) / (original.parameters or 1), 4),
            "shares": one.shares,
            "metrics": dict(metrics),
            **{stage.model: stage.quality.to_json() for stage in stages},
        }


def mixtures(best: Tried, tried: list[Tried]) -> Iterator[tuple[str, Tried, Mapping[str, str]]]:
    """Yield name, shares and metrics of each mixture."""
    yield "shrink", best, best.metrics
    whole = [one for one in tried if one.stage == "whole"]
    for one in whole:
        if len(one.shares) == 1:
            yield f"{next(iter(one.shares))} alone", one, one.metrics
    even = max(whole, key=lambda one: (len(one.shares), min(one.shares.values()) - max(one.shares.values())))
    yield "even shares", even, even.metrics
    drawn = {name: metric if name == "tokens" else "random" for name, metric in best.metrics.items()}
    if drawn != dict(best.metrics):
        yield "random", best, drawn


def turned(path: Path, folder: Path, share: float) -> Path:
    """Copy a file, or the files of a directory, with the lines from `share` of the file on before those above it."""
    made = folder / path.name
    if path.is_dir():
        made.mkdir()
        for file in path.iterdir():
            turned(file, made, share)
    else:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        start = int(share * len(lines))
        made.write_text("".join(lines[start:] + lines[:start]), encoding="utf-8")
    return made


def main() -> None:
    """Print a line of JSON for each row."""
    parser = runs.parser(__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    for name in ("text", "data", "labelled"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("pairs", "only"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--params", default="0.75,0.5")
    counts = {"score-tokens": 16384, "trial-tokens": 4096, "trials": 8, "heal-steps": None, "seeds": 1}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    names = ("score_tokens", "trial_tokens", "trials", "heal_steps", "only")
    kept = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    for seed in range(given.seeds):
        with TemporaryDirectory() as folder:
            text, data, labelled = (
                path and turned(path, Path(folder), seed / given.seeds)
                for path in (given.text, given.data, given.labelled)
            )
            choice = TextChoice(
                files=(text,) if text else (), data=data, labelled=labelled, pairs=given.pairs
            )
            for model in given.models:
                for params in map(float, given.params.split(",")):
                    for row in rows(model, choice, ShrinkOptions(params=params, **kept)):
                        print(json.dumps({"params": params, "seed": seed, **row}), flush=True)


if __name__ == "__main__":
    main()
