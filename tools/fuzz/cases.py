"""Which files are damaged for which commands, and how often."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.families import DECODERS, TRANSLATORS
from tests.fuzz.hostile import BY_NAME
from tests.reference.quantisation import SCHEMES
from tools.fuzz.commands import (
    CLASSIFIER,
    EMBEDDING,
    EXPLAINING,
    LM,
    MIXTURE,
    MOE,
    REWRITES,
    SEQ2SEQ,
    STREAMED,
)
from tools.fuzz.materials import (
    EVALUATE,
    GATES,
    HEADLESS,
    INTERRUPTED,
    MIXTURES,
    ONE,
    PLAIN,
    QUANTISED,
    STREAM,
    TEXT,
    TEXT_GATES,
    TRAIN,
    UNFINISHED,
    folder_of,
)


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
        processes: how many run the command together.
    """

    kind: str
    needs: tuple[str, ...]
    targets: tuple[str, ...]
    commands: tuple[str, ...]
    weight: float = 1.0
    served: str = ""
    processes: int = 1


EXPLAINED = ("reduced-1", "reduced", "widths", "cut-heads", "cut-layers", "trimmed", "constant")
DECISIONS = "{m}/prunecli_decisions.json"
CONFIGS = ("{m}/config.json", "{m}/generation_config.json", "{m}/tokenizer_config.json")
WORDS_OF = (*CONFIGS[1:], "{m}/tokenizer.json", "{m}/chat_template.jinja", "{m}/special_tokens_map.json")
WEIGHTS = ("{m}/*.safetensors", "{m}/*.index.json", "{m}/*.bin")
TEXTS = ("data", "text.txt", "keep.txt", "chats.jsonl")


def _model(
    kind: str, name: str, targets: Iterable[str], commands: Iterable[str], weight: float = 1.0
) -> Case:
    run = tuple(command.format(m=name) for command in commands)
    # Statistics are copied where they are read: they are most of the work of a small round.
    named = tuple(
        file for file in ("gates.json", "mixture-gates.json") if any(f" {file}" in command for command in run)
    )
    return Case(kind, (name, *named, *TEXTS), tuple(target.format(m=name) for target in targets), run, weight)


def _together(cases: Iterable[Case], weight: float) -> list[Case]:
    """The cases, which have this weight together."""
    found = list(cases)
    return [replace(case, weight=weight / len(found)) for case in found]


def _of_models() -> list[Case]:
    moe: tuple[str, ...] = (*REWRITES, *MOE, f"collect-gates {{m}} {ONE} -o out.json")
    moe = (*moe, f"collect-gates {{m}} {ONE} --memory 4GiB -o out.json", *SEQ2SEQ)
    plain = {
        "moe": moe,
        **dict.fromkeys(TRANSLATORS, (*REWRITES, *SEQ2SEQ)),
        **dict.fromkeys(DECODERS, (*REWRITES, *LM)),
        **dict.fromkeys((*HEADLESS, "masked"), (*REWRITES, LM[0], *LM[3:8])),
        "bert": (*REWRITES, *CLASSIFIER),
    }
    reduced = {
        "reduced": (*REWRITES, *MOE[:3], *SEQ2SEQ),
        "shared": (*REWRITES, *SEQ2SEQ),
        "widths": (*REWRITES, *SEQ2SEQ),
        "attention": (*REWRITES, *SEQ2SEQ),
        "defined": (*REWRITES, *LM),
        "constant": MIXTURE,
    }
    shards = ("moe", "moe-sharded", "moe-pickled")
    every = (*CONFIGS, *WEIGHTS[:2], "{m}/tokenizer.json")
    dense = [folder_of(scheme, dense=True) for scheme in SCHEMES]
    return [
        *_together((_model("weights", name, WEIGHTS, (*REWRITES, *MOE)) for name in shards), 8),
        *_together(
            (_model("weights, model run", name, WEIGHTS, moe[-len(SEQ2SEQ) - 2 :]) for name in shards), 4
        ),
        *_together((_model("config.json", name, CONFIGS[:1], run) for name, run in plain.items()), 14),
        *_together((_model("tokenizer", name, WORDS_OF, run) for name, run in plain.items()), 5),
        *_together((_model("structure", name, CONFIGS[:1], run) for name, run in reduced.items()), 14),
        *_together((_model("decisions", name, (DECISIONS, CONFIGS[0]), EXPLAINING) for name in EXPLAINED), 6),
        _model("mixtures", "mixture", (*every, *WORDS_OF), MIXTURE, 4),
        *_together((_model("mixtures", name, every, MIXTURE) for name in MIXTURES.values()), 12),
        *_together((_model("quantised", folder_of(scheme), every, MIXTURE) for scheme in QUANTISED), 8),
        *_together((_model("quantised", name, every, (*LM, REWRITES[10])) for name in dense), 5),
        Case(
            "embedding models",
            ("sentence", "pairs.tsv", *TEXTS),
            (
                *(f"sentence/{name}" for name in ("modules.json", "*/config.json", "*/*.safetensors")),
                *("sentence/*.json", "sentence/*.safetensors", "pairs.tsv"),
            ),
            EMBEDDING,
            6,
        ),
    ]


def _of_documents() -> list[Case]:
    statistics = (
        (
            ("moe", "gates.json"),
            (
                "prune-experts moe --gates gates.json --ratio 0.5 -o out",
                "prune-experts moe --gates gates.json --ratio 0.5 --explain --dry-run",
                "prune-experts moe --gates gates.json --strategy global-threshold --ratio 0.5 -o out",
                "compare-languages gates.json --ratio 0.5 -o out.json",
            ),
        ),
        (
            ("moe", "heads.json", "other-heads.json"),
            (
                "prune-heads moe --scores heads.json --ratio 0.5 -o out",
                "compare-heads heads.json other-heads.json --table out.csv -o out.json",
            ),
        ),
        (
            ("moe", "experts.json", "kept-heads.json"),
            (
                "prune-experts moe --keep experts.json -o out",
                "prune-heads moe --keep kept-heads.json -o out",
            ),
        ),
        (
            ("mixture", "mixture-gates.json", "mixture-gates.outputs.safetensors"),
            (
                "prune-experts mixture --gates mixture-gates.json --ratio 0.5 -o out",
                "prune-experts mixture --gates mixture-gates.json --for a --metric ean --ratio 0.25 -o out",
                "prune-experts mixture --gates mixture-gates.json --ratio 0.5 --constant-experts -o out",
                "compare-languages mixture-gates.json --ratio 0.5 -o out.json",
            ),
        ),
    )
    results = (
        "gates.json",
        "mixture-gates.json",
        "heads.json",
        "bert-heads.json",
        "evaluation.json",
        "lm.json",
        "classification.json",
        "embedding.json",
        "similarity.json",
        "languages.json",
        "head-comparison.json",
        "latency.json",
        "tuned.finetune.json",
        "reduced",
    )
    recipe = ("moe", "data", "recipe.yaml")
    made, dry = (*recipe, ".prunecli", "new"), "run recipe.yaml --dry-run"
    states = (
        ("state-gates", "moe", GATES),
        ("state-evaluate", "moe", EVALUATE),
        ("state-texts", "mixture", TEXT_GATES),
    )
    return [
        *_together((Case("statistics", needs, needs[1:], commands) for needs, commands in statistics), 9),
        Case("results", results, ("*.json", "reduced/config.json"), ("report . -o out.html",), 5),
        Case("recipes", recipe, ("recipe.yaml",), (dry, f"{dry} --set langs=x", f"{dry} --html out.html"), 4),
        Case("recipes by name", ("text.txt",), ("text.txt",), BY_NAME, 1),
        Case("recipe's state", made, (".prunecli/recipe.json", "new/**/*.json"), (dry,), 1),
        Case("recipe's state", made, (".prunecli/recipe.json", "new/**/*"), ("run recipe.yaml",), 0.1),
        Case(
            "finetune's state",
            ("m2m_100", "data", "tuned.training"),
            ("tuned.training/**/*",),
            (f"finetune m2m_100 {TRAIN} -o tuned",),
            2,
        ),
        *(
            Case("partial results", (model, "data", "text.txt", state), (".out.json.partial",), (command,))
            for state, model, command in states
        ),
        Case(
            "text",
            ("moe", "m2m_100", "groups.tsv", "data"),
            ("data/*.fra_Latn", "data/*.eng_Latn", "groups.tsv"),
            (
                f"collect-gates moe {ONE} -o out.json",
                *(command.format(m="m2m_100") for command in SEQ2SEQ),
                f"{EVALUATE} --groups groups.tsv",
                "trim-vocabulary m2m_100 --data data -o out",
            ),
            4,
        ),
        Case(
            "text",
            (
                "gpt2",
                "bert",
                "mixture",
                "sentence",
                "text.txt",
                "labelled.tsv",
                "pairs.tsv",
                "keep.txt",
                "chats.jsonl",
            ),
            ("text.txt", "labelled.tsv", "pairs.tsv", "keep.txt", "chats.jsonl"),
            (
                *(command.format(m="gpt2") for command in LM),
                *CLASSIFIER,
                *EMBEDDING[:2],
                "trim-vocabulary gpt2 --text text.txt --keep keep.txt -o out",
                "collect-gates mixture --text a=text.txt --text b=chats.jsonl --device cpu -o out.json",
                "evaluate gpt2 --text a=text.txt --text b=keep.txt --whole-files --device cpu -o out.json",
            ),
            4,
        ),
    ]


def _of_hubs_and_processes() -> list[Case]:
    moe, mixture = "moe-sharded", "mixture"
    together = (
        (moe, f"collect-gates {moe} {ONE} -o out.json"),
        (moe, f"collect-gates {moe} {ONE} --memory 4GiB -o out.json"),
        (moe, f"evaluate {moe} {ONE} --beam 1 --max-new-tokens 4 --bootstrap 5 -o out.json"),
        (mixture, f"collect-gates {mixture} --text a=text.txt --device cpu --memory 4GiB -o out.json"),
        (mixture, f"evaluate {mixture} --task lm {PLAIN} --memory 4GiB -o out.json"),
        (moe, f"finetune {moe} {TEXT} --steps 1 --eval-every 1 -o out"),
    )

    def damaged(name: str) -> tuple[str, ...]:
        return tuple(target.format(m=name) for target in (*WEIGHTS, *CONFIGS))

    hubs = (Case("hub", (name, "text.txt"), damaged(name), STREAMED, served=name) for name in (moe, mixture))
    pairs = (
        Case("two processes", (name, "data", "text.txt"), damaged(name), (command,), processes=2)
        for name, command in together
    )
    unfinished = (f"{UNFINISHED}/*", f"{UNFINISHED}/.*")
    return [
        *_together(hubs, 8),
        Case("partial results", (moe, "state-stream"), unfinished, (STREAM,), served=moe),
        *_together(pairs, 0.4),
    ]


CASES = (*_of_models(), *_of_documents(), *_of_hubs_and_processes())


def copy_needed(case: Case, material: Path, folder: Path) -> None:
    """What the case needs, copied into a new folder; of a state what lies in its folder."""
    folder.mkdir()
    for name in case.needs:
        source = material / name
        if name in (*INTERRUPTED, "state-stream"):
            shutil.copytree(source, folder, dirs_exist_ok=True)
        elif source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copyfile(source, folder / name)
