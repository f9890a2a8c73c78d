"""What every method costs a published model, unhealed and healed: perplexity, or of an embedding model Spearman.

    python benchmarks/language_model.py smollm2 valid.txt
    python benchmarks/language_model.py smollm2 valid.txt --heal-minutes 10 --rows "units by activation-norm"
    python benchmarks/language_model.py minilm dev.tsv

TEXT is plain text for a causal language model, scored pairs of sentences (similarity, tab, sentence, tab, sentence) for
a model without a head. Its first part is measured on, the next part gives the scores, and healing trains on the rest
with CHECKPOINT as teacher. Each figure is written to --out at once; a further run measures what is missing.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import runs
import torch

import prunecli
from prunecli.text.choice import task_of

DOCUMENT = 8000
"""Characters of a document: windows of about 2,000 tokens."""

Plan = Callable[[prunecli.Checkpoint, float], prunecli.Rewrite]


@dataclass(frozen=True)
class Texts:
    """The parts of TEXT, and the score that tells how good a model is."""

    test: prunecli.TextChoice
    scored: prunecli.TextChoice
    train: prunecli.TextChoice
    task: Any
    score: str


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    done: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as name, prunecli.open_model(options.checkpoint) as model:
        folder = Path(name)
        texts = split(model, options, folder)

        def measured(key: str, make: Callable[[], Path]) -> None:
            if key not in done:
                begun = time.perf_counter()
                path = make()
                seconds = time.perf_counter() - begun
                done[key] = {**score(path, texts, options), "seconds": round(seconds)}
                options.out.write_text(json.dumps(done, indent=1))
                print(f"{key}: {done[key]}", flush=True)

        measured("original", lambda: model.path)
        for row, plan in rows(texts, options, folder).items():
            for ratio in options.ratios:
                if re.search(options.rows, row):
                    key = f"{row}, {ratio:.0%}"
                    measured(key, partial(pruned, model, plan, ratio, folder))
                    if options.heal_minutes:
                        heal = partial(healed, model, plan, ratio, texts, options, folder)
                        measured(f"{key}, healed", heal)
    print(table(done, texts, options))


def split(model: prunecli.Checkpoint, options: argparse.Namespace, folder: Path) -> Texts:
    """Cut TEXT into its three parts."""
    lines = options.text.read_text(encoding="utf-8").splitlines(keepends=True)
    ends, read = [0], 0
    sizes = iter((options.test_bytes, options.scored_bytes))
    size = next(sizes)
    for number, line in enumerate(lines, 1):
        read += len(line.encode())
        if read >= size and len(ends) < 3:
            ends.append(number)
            read, size = 0, next(sizes, 0)
    parts = [lines[start:end] for start, end in zip(ends, [*ends[1:], len(lines)], strict=True)]
    task = task_of(model)
    files = [folder / f"{name}.jsonl" for name in ("test", "scored", "train")]
    for file, part in zip(files, parts, strict=True):
        if task == "lm":
            whole = "".join(part)
            documents = [whole[start : start + DOCUMENT] for start in range(0, len(whole), DOCUMENT)]
        else:
            documents = [text for line in part for text in line.rstrip("\n").split("\t")[1:]]
        file.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents if one.strip()))
    test, scored, train = (prunecli.TextChoice(files=(file,)) for file in files)
    if task == "lm":
        return Texts(test, scored, train, task, "perplexity")
    labelled = folder / "test.tsv"
    labelled.write_text("".join(parts[0]), encoding="utf-8")
    return Texts(prunecli.TextChoice(labelled=labelled), scored, train, task, "spearman")


def score(path: Path, texts: Texts, options: argparse.Namespace) -> dict[str, Any]:
    """The score of a model, and its parameters."""
    evaluation = prunecli.EvaluationOptions(device=options.device, dtype=options.dtype)
    found = prunecli.evaluate({"model": path}, texts.test, evaluation, task=texts.task)
    assert found is not None
    with prunecli.open_model(path) as opened:
        parameters = sum(info.numel for info in opened.unquantised.values())
    return {texts.score: found.results[0].scores[texts.score], "parameters": parameters}


def rows(texts: Texts, options: argparse.Namespace, folder: Path) -> dict[str, Plan]:
    """Row of the table -> from a model and a ratio to the rewrite."""
    run = prunecli.TextRun(texts.scored, prunecli.RunOptions(device=options.device))

    def units(score: Any, opened: prunecli.Checkpoint, ratio: float) -> prunecli.Rewrite:
        chosen = prunecli.NarrowOptions(ratio=ratio, metric=score, seed=options.seed)
        return prunecli.cut(opened, prunecli.plan_widths(opened, chosen, run))

    def layers(
        metric: Any, opened: prunecli.Checkpoint, ratio: float, *, contiguous: bool = False
    ) -> prunecli.Rewrite:
        chosen = prunecli.LayerOptions(ratio=ratio, metric=metric, contiguous=contiguous, seed=options.seed)
        return prunecli.cut(opened, prunecli.plan_layers(opened, chosen, run))

    def heads(how: dict[str, Any], opened: prunecli.Checkpoint, ratio: float) -> prunecli.Rewrite:
        file = folder / f"heads-{how.get('per')}.json"
        if how.get("metric") != "random" and not file.exists():
            scoring = prunecli.ScoreOptions(device=options.device, per=how.get("per"))
            prunecli.score_heads(opened, texts.scored, scoring, file, task=texts.task)
        own = {key: value for key, value in how.items() if key != "per"}
        chosen = prunecli.HeadOptions(scores=(file,), ratio=ratio, seed=options.seed, **own)
        return prunecli.cut(opened, prunecli.plan_heads(opened, chosen))

    def shared(opened: prunecli.Checkpoint, ratio: float) -> prunecli.Rewrite:
        chosen = prunecli.FfnOptions(preset="Shared", groups=(groups_of(opened, ratio),))
        return prunecli.rewrite_shared(opened, prunecli.plan_ffn(opened, chosen))

    def attentions(opened: prunecli.Checkpoint, ratio: float) -> prunecli.Rewrite:
        chosen = prunecli.AttentionOptions(preset="Shared", groups=(groups_of(opened, ratio),))
        return prunecli.rewrite_shared(opened, prunecli.plan_attention(opened, chosen))

    def vocabulary(opened: prunecli.Checkpoint, _ratio: float) -> prunecli.Rewrite:
        lines = texts.train.lines()
        plan = prunecli.plan_vocabulary(opened, lines, prunecli.VocabularyOptions())
        return prunecli.cut(opened, plan)

    by_loss = "perplexity" if texts.task == "lm" else "embedding"
    return {
        **{
            f"units by {name}": partial(units, name)
            for name in ("activation-norm", "activation", "norms", "random")
        },
        **{
            f"layers by {name}": partial(layers, name)
            for name in ("cosine", "cka", by_loss, "last", "random")
        },
        "layers by cosine, contiguous": partial(layers, "cosine", contiguous=True),
        "heads by gradient": partial(heads, {}),
        "heads by gradient, not normalised": partial(heads, {"normalize": "none"}),
        "heads by gradient per token": partial(heads, {"per": "token"}),
        "heads by gradient per token, not normalised": partial(heads, {"per": "token", "normalize": "none"}),
        "heads at random": partial(heads, {"metric": "random"}),
        "shared FFNs": shared,
        "shared attentions": attentions,
        "tokens of the text": vocabulary,
    }


def groups_of(opened: prunecli.Checkpoint, ratio: float) -> int:
    """The largest number of groups of equal size that shares at least this part of the layers' modules."""
    depth = len(opened.layout.layers)
    return max(
        groups for groups in range(1, depth + 1) if depth % groups == 0 and groups <= (1 - ratio) * depth
    )


def pruned(model: prunecli.Checkpoint, plan: Plan, ratio: float, folder: Path) -> Path:
    """The directory of the result."""
    prunecli.apply(model, plan(model, ratio), folder / "pruned", force=True)
    return folder / "pruned"


def healed(
    model: prunecli.Checkpoint,
    plan: Plan,
    ratio: float,
    texts: Texts,
    options: argparse.Namespace,
    folder: Path,
) -> Path:
    """The result, trained with the original as teacher."""
    training = prunecli.TrainingOptions(
        loss=prunecli.LossOptions(label_smoothing=0, distill=0.9 if texts.task == "lm" else 0),
        steps=None,
        epochs=None,
        minutes=options.heal_minutes,
        batch_tokens=options.batch_tokens,
        learning_rate=options.learning_rate,
        warmup=20,
        teacher=model.path,
        context=options.context,
        device=options.device,
        seed=options.seed,
    )
    target = folder / "healed"
    destination = prunecli.Destination(target, force=True)
    source = pruned(model, plan, ratio, folder)
    prunecli.finetune(source, texts.train, destination, training, valid=texts.scored, task=texts.task)
    return target


def table(done: dict[str, Any], texts: Texts, options: argparse.Namespace) -> str:
    """Markdown: a row for each method, a column for each ratio, healed figures behind an arrow."""
    names = dict.fromkeys(key.split(", healed")[0].rsplit(", ", 1)[0] for key in done if key != "original")

    def cell(key: str) -> str:
        found = [done[one][texts.score] for one in (key, f"{key}, healed") if one in done]
        return " → ".join(f"{value:,.4f}" if value < 1 else f"{value:,.1f}" for value in found)

    lines = [
        f"| {texts.score} ({cell('original')} before) | "
        + " | ".join(f"{one:.0%}" for one in options.ratios)
        + " |",
        "| --- |" + " --- |" * len(options.ratios),
    ]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(cell(f"{name}, {one:.0%}") for one in options.ratios) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("language-model.json"), help="results so far")
    parser.add_argument("--rows", default="", help="only rows that match this regular expression")
    parser.add_argument(
        "--ratios", type=lambda text: [float(one) for one in text.split(",")], default=[0.1, 0.25, 0.5]
    )
    parser.add_argument("--test-bytes", type=int, default=70_000, help="of TEXT, measured on")
    parser.add_argument("--scored-bytes", type=int, default=70_000, help="of TEXT, scores come from")
    parser.add_argument("--heal-minutes", type=float, default=0, help="of training, for each figure")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="of the training")
    parser.add_argument("--context", type=int, default=256, help="of the training")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="that models are measured in")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
