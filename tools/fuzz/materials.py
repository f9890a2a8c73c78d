"""What is damaged: tiny models of every family and scheme, what commands make of them, recipes and text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from tests.families import ENCODERS, MODEL_TYPES, mixtures, tiny_family
from tests.quantising import quantise
from tests.reference.quantisation import SCHEMES
from tests.sentence_model import sentence_model
from tests.stock_mixtures import tiny_mixture, write_sentinels
from tests.tiny import tiny_nllb_moe, write_plain_tokenizer

WORDS = [
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
]
TEXT = "--data data --pairs eng_Latn-fra_Latn --batch-tokens 200 --device cpu"
ONE = f"{TEXT} --split val"
PLAIN = "--text text.txt --batch-tokens 60 --device cpu"
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
    f"score-heads moe {TEXT} --split test -o other-heads.json",
    "score-heads bert --labelled labelled.tsv --task classification --batch-tokens 200 --device cpu -o bert-heads.json",
    "prune-experts moe --gates gates.json --ratio 0.5 -o reduced-1",
    "prune-experts moe --gates gates.json --ratio 0.5 --dry-run --json",
    "prune-heads moe --scores heads.json --ratio 0.5 --dry-run --json",
    "prune-heads reduced-1 --metric random --ratio 0.3 -o reduced-2",
    "share-ffn reduced-2 --preset SharedEncSharedDec --dense-only -o reduced-3",
    "factorize-embeddings reduced-3 --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 1 -o reduced",
    "share-ffn m2m_100 --preset SharedEncNoDec -o shared",
    "factorize-embeddings gpt2 --map-dim 4 --expand-dim 12 --max-groups 2 --epochs 1 -o defined",
    "prune-ffn m2m_100 --metric norms --uneven --ratio 0.5 -o widths",
    "share-attention m2m_100 --encoder share --decoder share -o attention",
    "prune-heads moe --scores heads.json --ratio 0.5 -o cut-heads",
    f"prune-layers m2m_100 {ONE} --metric cosine --count 1 -o cut-layers",
    "trim-vocabulary gpt2 --text text.txt --min-count 2 -o trimmed",
    "collect-gates mixture --text a=text.txt --text b=keep.txt --device cpu --mean-outputs -o mixture-gates.json",
    "prune-experts mixture --gates mixture-gates.json --ratio 0.5 --constant-experts -o constant",
    f"evaluate moe reduced {ONE} --beam 1 --max-new-tokens 8 --bootstrap 10 -o evaluation.json",
    f"evaluate gpt2 defined {PLAIN} --continuations 2 --max-new-tokens 4 -o lm.json",
    "evaluate bert --labelled labelled.tsv --device cpu -o classification.json",
    f"evaluate sentence {PLAIN} -o embedding.json",
    f"compare-models moe reduced-1 {ONE} -o similarity.json",
    "compare-languages gates.json --ratio 0.5 -o languages.json",
    "compare-heads heads.json other-heads.json -o head-comparison.json",
    "bench-latency moe reduced-1 --runs 1 --warmup 0 --sentences 2 --max-new-tokens 2 --beam 1 --no-memory --data data"
    " --split val --pairs eng_Latn-fra_Latn --device cpu -o latency.json",
    f"finetune m2m_100 {TRAIN} -o tuned",
    "run recipe.yaml",
)
"""In the order in which they run, in a folder that holds the models and the text."""


GATES = f"collect-gates moe {ONE} -o out.json"
EVALUATE = f"evaluate moe {ONE} --beam 1 --max-new-tokens 6 --bootstrap 5 -o out.json"
TEXT_GATES = "collect-gates mixture --text a=text.txt --device cpu -o out.json"
INTERRUPTED = {"state-gates": GATES, "state-evaluate": EVALUATE, "state-texts": TEXT_GATES}
"""Folder with the hidden state that each leaves when it is interrupted."""

SERVED = "org/tiny"
"""Name of the model of a hub on loopback."""
STREAM = f"prune-experts {SERVED} --metric aimer --ratio 0.5 --stream -o out"
UNFINISHED = ".out.99999999.partial"
"""What an ended run of `STREAM` leaves beside its output."""

QUANTISED = {
    "fp8": "qwen3_moe",
    "fp8 by row": "olmoe",
    "int8": "qwen2_moe",
    "gptq": "mixtral",
    "gptq, ordered": "glm4_moe",
    "gptq, 8 bits": "deepseek_v3",
    "awq": "qwen3_moe",
    "packed": "dots1",
    "packed, with zero points": "qwen3_moe",
    "packed, 8 bits": "minimax_m2",
    "nvfp4": "qwen3_moe",
    "nvfp4 of modelopt": "deepseek_v2",
    "mxfp4": "gpt_oss",
}
"""Scheme -> type of a mixture whose experts are quantised so."""
MIXTURES = {name: f"mixture-{name}" for name in mixtures.MIXTURES}
"""Type of a mixture -> its folder."""


def folder_of(scheme: str, *, dense: bool = False) -> str:
    """Folder of a mixture, or of a dense model, that is quantised so."""
    return ("dense-" if dense else "quantised-") + scheme.replace(",", "").replace(" ", "-")


def write_models(folder: Path) -> None:
    """The stock models, text, a recipe and lists of ids; everything that needs no command."""
    tiny_nllb_moe(folder / "moe")
    tiny_nllb_moe(folder / "moe-sharded", shards=3)
    tiny_nllb_moe(folder / "moe-pickled", shards=2, pickled=True)
    for name in MODEL_TYPES:
        tiny_family(folder / name, name)
    shutil.rmtree(folder / "bert")
    tiny_family(folder / "bert", "bert", architectures=["BertForSequenceClassification"])
    tiny_family(folder / "masked", "bert")
    sentence_model(folder / "sentence")
    _mixture(folder / "mixture", "qwen3_moe")
    for model_type, name in MIXTURES.items():
        _mixture(folder / name, model_type)
    for scheme, model_type in QUANTISED.items():
        _mixture(folder / "plain", model_type)
        _quantised(folder, folder_of(scheme), scheme)
    for scheme in SCHEMES:
        tiny_family(folder / "plain", "llama")
        _quantised(folder, folder_of(scheme, dense=True), scheme)
    (folder / "data").mkdir()
    for split, count in (("train", 20), ("val", 20), ("test", 20)):
        for language in ("eng_Latn", "fra_Latn"):
            (folder / "data" / f"{split}.{language}").write_text(sentences(count, f"{split}{language}"))
    (folder / "text.txt").write_text(sentences(12, "text"))
    (folder / "keep.txt").write_text("a\nt\n")
    (folder / "groups.tsv").write_text("eng_Latn\thigh\nfra_Latn\tlow\n")
    lines = sentences(12, "labelled").splitlines()
    (folder / "labelled.tsv").write_text("".join(f"{i % 2}\t{line}\n" for i, line in enumerate(lines)))
    pairs = [f"{i % 6}.5\t{line}\t{lines[-i]}\n" for i, line in enumerate(lines)]
    (folder / "pairs.tsv").write_text("".join(pairs))
    chats: list[dict[str, Any]] = [{"text": line} for line in lines[:6]]
    chats += [{"messages": [{"role": "user", "content": line}]} for line in lines[6:]]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "recipe.yaml").write_text(RECIPE)


def _mixture(directory: Path, model_type: str) -> None:
    """A tiny mixture whose widths any scheme can group, with a tokenizer and a chat template."""
    directory.mkdir()
    sizes = {"intermediate_size": 32, "moe_intermediate_size": 32}
    tiny_mixture(model_type, **sizes).save_pretrained(directory)
    if model_type == "switch_transformers":
        write_sentinels(directory)
    else:
        write_plain_tokenizer(directory)
        template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        (directory / "chat_template.jinja").write_text(template)


def _quantised(folder: Path, name: str, scheme: str) -> None:
    """`folder / "plain"` made into a quantised model of this name."""
    dense = name.startswith("dense")
    quantise(folder / "plain", folder / name, folder / "values", scheme, _of_layers if dense else _of_experts)
    for made in ("plain", "values"):
        shutil.rmtree(folder / made)


def _of_experts(name: str) -> bool:
    """Whether a tensor's values are quantised."""
    return ".experts." in name and not name.endswith("bias")


def _of_layers(name: str) -> bool:
    return name.endswith("_proj.weight")


def sentences(count: int, seed: str) -> str:
    """Lines of a few words that the tiny tokenizers know."""
    rng = Random(seed)
    return "".join(" ".join(rng.choices(WORDS, k=rng.randint(2, 6))) + "\n" for _ in range(count))


HEADLESS = tuple(name for name in ENCODERS if name != "bert")
"""Masked language models of every family but BERT's, which classifies here."""
