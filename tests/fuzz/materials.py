"""What is damaged: tiny models, statistics, states of interrupted runs, results, recipes and text."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.families import tiny_family
from tests.quantising import quantise
from tests.stock_mixtures import tiny_mixture
from tests.tiny import tiny_nllb_moe, write_plain_tokenizer

WORDS = (
    "the",
    "hen",
    "ate",
    "an",
    "oat",
    "in",
    "tin",
    "barn",
    "one",
    "noon",
    "then",
    "ran",
    "home",
    "again",
    "42",
)
TEXT = "--data data --pairs eng_Latn-fra_Latn --batch-tokens 200 --device cpu"
ONE = f"{TEXT} --split val"
TRAIN = f"{TEXT} --steps 3 --eval-every 2 --warmup 1 --keep-state"

RECIPE = """\
variables:
  langs: eng_Latn,fra_Latn
  ratios: [0.25, 0.5]
steps:
- name: gates
  command: collect-gates
  arguments: {checkpoint: moe, data: data, split: val, langs: "${langs}", output: new/gates.json}
- name: prune ${ratio}
  command: prune-experts
  for-each: {ratio: "${ratios}"}
  arguments: {checkpoint: moe, gates: new/gates.json, ratio: "${ratio}", output: "new/pruned-${ratio}"}
- name: heads
  command: prune-heads
  arguments: {checkpoint: new/pruned-0.5, metric: random, ratio: 0.25, output: new/heads}
report:
  title: sizes
  checkpoints: {before: moe, after: new/heads}
"""

PREPARATION = (
    f"collect-gates moe {ONE} -o gates.json",
    f"score-heads moe {ONE} -o heads.json",
    "score-heads bert --labelled labelled.tsv --task classification --batch-tokens 200 --device cpu -o bert-heads.json",
    "prune-experts moe --metric random --ratio 0.5 -o reduced-1 --force",
    "prune-experts moe --gates gates.json --ratio 0.5 --dry-run --json",
    "prune-heads moe --scores heads.json --ratio 0.5 --dry-run --json",
    "prune-heads reduced-1 --metric random --ratio 0.3 -o reduced-2",
    "share-ffn reduced-2 --config SharedEncSharedDec --dense-only -o reduced-3",
    "factorize-embeddings reduced-3 --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 1 -o reduced",
    "share-ffn m2m_100 --config SharedEncNoDec -o shared",
    "factorize-embeddings gpt2 --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 1 -o defined",
    f"evaluate moe reduced {ONE} --beam 1 --max-new-tokens 8 --bootstrap 10 -o evaluation.json",
    f"compare-models moe reduced-1 {ONE} -o similarity.json",
    "compare-languages gates.json --ratio 0.5 -o languages.json",
    f"finetune m2m_100 {TRAIN} -o tuned",
    "run recipe.yaml",
    "collect-gates mixture --text a=text.txt --device cpu -o mixture-gates.json",
    "share-attention m2m_100 --encoder share --decoder share -o attention",
)
"""In the order in which they run, in a folder that holds the models and the text."""


GATES = f"collect-gates moe {ONE} -o out.json"
EVALUATE = f"evaluate moe {ONE} --beam 1 --max-new-tokens 6 --bootstrap 5 -o out.json"
INTERRUPTED = {"state-gates": GATES, "state-evaluate": EVALUATE}
"""Folder with the hidden state that each leaves when it is interrupted."""


@dataclass(frozen=True)
class Case:
    """Files that are damaged, and commands that read them.

    Attributes:
        kind: the row of the table.
        needs: names of the material that the commands need.
        targets: patterns of the files of which some are damaged.
        commands: of which one runs; it writes `out` or `out.json`, if anything.
        weight: how often, beside the others.
        served: a directory that is `SERVED` of a hub on loopback, whose answers are damaged too; empty: none.
    """

    kind: str
    needs: tuple[str, ...]
    targets: tuple[str, ...]
    commands: tuple[str, ...]
    weight: float = 1.0
    served: str = ""


SERVED = "org/tiny"
LIGHT = (
    "inspect {m}",
    "inspect {m} --json",
    "prune-heads {m} --metric random --ratio 0.5 -o out",
    "share-ffn {m} --config OneWide --dense-only -o out",
    "share-ffn {m} --config SharedEncSharedDec --dense-only -o out",
    "factorize-embeddings {m} --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 0 -o out",
    "trim-vocabulary {m} --text text.txt -o out",
    "prune-layers {m} --layers 1 -o out",
    "prune-ffn {m} --ratio 0.5 --dense-only -o out",
    "share-attention {m} --encoder share -o out",
    "share-attention {m} --decoder share -o out",
)
MOE = (
    "inspect {m} --fit 100KiB",
    "prune-experts {m} --metric random --ratio 0.5 -o out",
    "prune-experts {m} --metric random --fit 60KiB -o out --dtype float16",
    "prune-experts {m} --gates gates.json --ratio 0.25 -o out",
)
SEQ2SEQ = (
    f"score-heads {{m}} {ONE} -o out.json",
    f"evaluate {{m}} {ONE} --beam 2 --max-new-tokens 6 --bootstrap 5 -o out.json",
    f"compare-models {{m}} {{m}} {ONE} -o out.json",
    f"finetune {{m}} {TEXT} --steps 1 --eval-every 1 -o out",
)
LM = (
    "evaluate {m} --text text.txt --task lm --batch-tokens 200 -o out.json",
    "score-heads {m} --text text.txt --task lm --batch-tokens 200 -o out.json",
)
MIXTURE = (
    "inspect {m}",
    "inspect {m} --fit 60KiB",
    "prune-experts {m} --metric random --ratio 0.5 -o out",
    "prune-experts {m} --metric aimer --ratio 0.5 -o out",
    "prune-experts {m} --gates mixture-gates.json --ratio 0.5 -o out",
    "prune-layers {m} --layers 1 -o out",
    "trim-vocabulary {m} --text text.txt -o out",
    "collect-gates {m} --text a=text.txt --device cpu -o out.json",
    "collect-gates {m} --text a=text.txt --device cpu --memory 4GiB -o out.json",
    "evaluate {m} --text text.txt --task lm --batch-tokens 200 --device cpu -o out.json",
    "evaluate {m} --text text.txt --task lm --batch-tokens 200 --device cpu --memory 4GiB -o out.json",
)
STREAMED = (
    f"inspect {SERVED}",
    f"prune-experts {SERVED} --metric random --ratio 0.5 -o out",
    f"prune-experts {SERVED} --metric random --ratio 0.5 --stream -o out",
    f"prune-layers {SERVED} --layers 1 --stream -o out",
    f"trim-vocabulary {SERVED} --text text.txt --stream -o out",
)
QUANTISED = {"fp8": "qwen3_moe", "gptq": "mixtral", "mxfp4": "gpt_oss"}
"""Scheme -> type of a mixture whose experts are quantised so."""
CONFIGS = ("{m}/config.json", "{m}/generation_config.json", "{m}/tokenizer_config.json")
WEIGHTS = ("{m}/*.safetensors", "{m}/*.index.json", "{m}/*.bin")


def _model(
    kind: str, name: str, targets: tuple[str, ...], commands: tuple[str, ...], weight: float = 1.0
) -> Case:
    extra = ("gates.json", "mixture-gates.json", "data", "text.txt")
    return Case(
        kind,
        (name, *extra),
        tuple(target.format(m=name) for target in targets),
        tuple(command.format(m=name) for command in commands),
        weight,
    )


def _cases() -> tuple[Case, ...]:
    moe = (*LIGHT, *MOE, f"collect-gates {{m}} {ONE} -o out.json", *SEQ2SEQ)
    found = []
    for name in ("moe", "moe-sharded", "moe-pickled"):
        found.append(_model("weights", name, WEIGHTS, (*LIGHT, *MOE), 3))
        found.append(_model("weights, model run", name, WEIGHTS, (moe[-5:])))
    for name, run in (
        ("moe", moe),
        ("m2m_100", (*LIGHT, *SEQ2SEQ)),
        ("t5", (*LIGHT, *SEQ2SEQ)),
        ("gpt2", (*LIGHT, *LM)),
        ("llama", (*LIGHT, *LM)),
        ("bert", LIGHT),
    ):
        found.append(_model("config.json", name, CONFIGS[:1], run, 2))
        found.append(_model("tokenizer", name, (*CONFIGS[1:], f"{name}/tokenizer.json"), run, 0.5))
    for name, run in (
        ("reduced", (*LIGHT, *MOE[:3], *SEQ2SEQ)),
        ("shared", (*LIGHT, *SEQ2SEQ)),
        ("defined", (*LIGHT, *LM)),
    ):
        found.append(_model("structure", name, CONFIGS[:1], run, 4))
    found += [
        Case(
            "statistics",
            ("moe", "gates.json"),
            ("gates.json",),
            (
                "prune-experts moe --gates gates.json --ratio 0.5 -o out",
                "prune-experts moe --gates gates.json --strategy global-threshold --ratio 0.5 -o out",
                "compare-languages gates.json --ratio 0.5 -o out.json",
            ),
            3,
        ),
        Case(
            "statistics",
            ("moe", "heads.json"),
            ("heads.json",),
            ("prune-heads moe --scores heads.json --ratio 0.5 -o out",),
            2,
        ),
        Case(
            "statistics",
            ("moe", "experts.json", "kept-heads.json"),
            ("experts.json", "kept-heads.json"),
            (
                "prune-experts moe --experts experts.json -o out",
                "prune-heads moe --heads kept-heads.json -o out",
            ),
            2,
        ),
        Case(
            "results",
            (
                "gates.json",
                "heads.json",
                "evaluation.json",
                "similarity.json",
                "languages.json",
                "tuned.finetune.json",
                "reduced",
            ),
            ("*.json", "reduced/config.json"),
            ("report . -o out.html",),
            4,
        ),
        Case(
            "recipes",
            ("moe", "data", "recipe.yaml"),
            ("recipe.yaml",),
            ("run recipe.yaml --dry-run", "run recipe.yaml --dry-run --set langs=x"),
            4,
        ),
        Case(
            "recipe's state",
            ("moe", "data", "recipe.yaml", ".prunecli", "new"),
            (".prunecli/recipe.json", "new/**/*.json"),
            ("run recipe.yaml --dry-run",),
            1,
        ),
        Case(
            "finetune's state",
            ("m2m_100", "data", "tuned.training"),
            ("tuned.training/**/*",),
            (f"finetune m2m_100 {TRAIN} -o tuned",),
            2,
        ),
        Case("partial results", ("moe", "data", "state-gates"), (".out.json.partial",), (GATES,), 1),
        Case("partial results", ("moe", "data", "state-evaluate"), (".out.json.partial",), (EVALUATE,), 1),
        Case(
            "text",
            ("moe", "m2m_100", "data"),
            ("data/*.fra_Latn", "data/*.eng_Latn"),
            (
                f"collect-gates moe {ONE} -o out.json",
                *(command.format(m="m2m_100") for command in SEQ2SEQ),
                "trim-vocabulary m2m_100 --data data -o out",
            ),
            3,
        ),
        Case(
            "text",
            ("gpt2", "bert", "text.txt", "labelled.tsv", "keep.txt"),
            ("text.txt", "labelled.tsv", "keep.txt"),
            (
                *(command.format(m="gpt2") for command in LM),
                "trim-vocabulary gpt2 --text text.txt --keep keep.txt -o out",
                "evaluate bert --labelled labelled.tsv --task classification -o out.json",
                "evaluate bert --text text.txt --task mlm -o out.json",
                "finetune bert --labelled labelled.tsv --valid-labelled labelled.tsv --task classification"
                " --steps 1 --eval-every 1 -o out",
            ),
            3,
        ),
    ]
    for name in ("mixture", *QUANTISED):
        targets = (*WEIGHTS[:2], *CONFIGS, f"{name}/tokenizer.json")
        found.append(_model("mixtures" if name == "mixture" else "quantised", name, targets, MIXTURE, 3))
    found.append(_model("structure", "attention", CONFIGS[:1], (*LIGHT, *SEQ2SEQ), 2))
    for name in ("moe-sharded", "mixture"):
        needs, targets = (name, "text.txt"), tuple(target.format(m=name) for target in (*WEIGHTS, *CONFIGS))
        found.append(Case("hub", needs, targets, STREAMED, 4, served=name))
    return tuple(found)


CASES = _cases()


def write_models(folder: Path) -> None:
    """The stock models, text, a recipe and lists of ids; everything that needs no command."""
    tiny_nllb_moe(folder / "moe")
    tiny_nllb_moe(folder / "moe-sharded", shards=3)
    tiny_nllb_moe(folder / "moe-pickled", shards=2, pickled=True)
    for name in ("m2m_100", "t5", "gpt2", "llama", "bert"):
        changes = {"architectures": ["BertForSequenceClassification"]} if name == "bert" else {}
        tiny_family(folder / name, name, **changes)
    for scheme, model_type in {"mixture": "qwen3_moe", **QUANTISED}.items():
        plain = folder / ("mixture" if scheme == "mixture" else f"plain-{scheme}")
        plain.mkdir()
        write_plain_tokenizer(plain)
        tiny_mixture(model_type, intermediate_size=32, moe_intermediate_size=32).save_pretrained(plain)
        if scheme != "mixture":
            values = folder / f"values-{scheme}"
            quantise(plain, folder / scheme, values, scheme, _of_experts)
            shutil.rmtree(plain)
            shutil.rmtree(values)
    (folder / "data").mkdir()
    for split, count in (("train", 20), ("val", 20), ("test", 20)):
        for language in ("eng_Latn", "fra_Latn"):
            (folder / "data" / f"{split}.{language}").write_text(sentences(count, f"{split}{language}"))
    (folder / "text.txt").write_text(sentences(12, "text"))
    (folder / "keep.txt").write_text("a\nt\n")
    lines = sentences(12, "labelled").splitlines()
    (folder / "labelled.tsv").write_text("".join(f"{i % 2}\t{line}\n" for i, line in enumerate(lines)))
    (folder / "recipe.yaml").write_text(RECIPE)


def _of_experts(name: str) -> bool:
    """Whether a tensor's values are quantised."""
    return ".experts." in name and not name.endswith("bias")


def sentences(count: int, seed: str) -> str:
    """Lines of a few words that the tiny tokenizers know."""
    rng = Random(seed)
    return "".join(" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) + "\n" for _ in range(count))


def copy_needed(case: Case, material: Path, folder: Path) -> None:
    """What the case needs, copied into a new folder."""
    folder.mkdir()
    for name in case.needs:
        source = material / name
        if name in INTERRUPTED:
            shutil.copyfile(source / ".out.json.partial", folder / ".out.json.partial")
        elif source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copyfile(source, folder / name)
