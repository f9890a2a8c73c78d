from typing import Any

import pytest
import yaml

from prunecli.architectures import NLLB_MOE
from prunecli.model.card import front_matter, model_card
from prunecli.model.layout import resolve
from prunecli.model.structure import Structure
from tests.structures import axes_of

LAYER = "model.encoder.layers.3.ffn"
STEP = {
    "command": "prune-experts",
    "arguments": {"ratio": 0.5, "metric": "importance", "source": ["eng_Latn"]},
    "prunecli": "0.1.0",
    "source": {"path": "nllb-moe-54b", "fingerprint": "sha256:abc"},
    "before": {"parameters": 1000, "bytes": 4000},
    "statistics": [{"file": "gates.json", "sha256": "def"}],
}
STOCK = {"model_type": "nllb-moe", "architectures": ["NllbMoeForConditionalGeneration"]}
UNEVEN = {
    "model_type": "nllb-moe",
    "auto_map": {
        "AutoModel": "modeling_prunecli.PrunecliNllbMoeModel",
        "AutoModelForSeq2SeqLM": "modeling_prunecli.PrunecliNllbMoeForConditionalGeneration",
    },
    "transformers_weights": "Not a stock model: experts differ. Open it with prunecli.load_model.",
}


def card(source: str = "", config: dict[str, Any] = STOCK, **fields: Any) -> str:
    values = {"axes": axes_of("expert", {LAYER: (1, 5)}, 8), "history": (STEP,), **fields}
    layout = resolve(NLLB_MOE, config, Structure(**values))
    return model_card(layout, source, 400, 800)


def matter_of(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text.split("---\n")[1]))


def test_says_what_was_removed_from_what_and_how():
    text = card()
    assert "# nllb-moe-54b, pruned" in text
    assert f"| `{LAYER}` | 2 | 8 | 75.0% | 1 5 |" in text
    assert "2 of 8 experts are left" in text
    assert "| parameters | 1,000 | 400 | 40.0% |" in text
    assert "| bytes of weights | 4,000 | 800 | 20.0% |" in text
    assert "1. `prune-experts` of prunecli 0.1.0\n   - from `nllb-moe-54b`, sha256:abc" in text
    assert 'ratio = 0.5, metric = "importance", source = ["eng_Latn"]' in text
    assert "statistics: `gates.json`, sha256 def" in text
    assert text.endswith("\n")


def test_says_how_to_load():
    text = card(config=UNEVEN)
    assert 'prunecli.load_model("path/to/this/directory")' in text
    assert 'AutoTokenizer.from_pretrained("path/to/this/directory")' in text
    assert "Not a stock model: experts differ." in text
    assert "(…, trust_remote_code=True)` of transformers' `AutoModel`, `AutoModelForSeq2SeqLM`" in text


@pytest.mark.parametrize(
    ("architectures", "auto"),
    [
        (["NllbMoeForConditionalGeneration"], "AutoModelForSeq2SeqLM"),
        (["NllbMoeModel"], "AutoModel"),
        ([], "AutoModelForSeq2SeqLM"),
    ],
)
def test_a_stock_model_needs_no_prunecli(architectures, auto):
    text = card(config={**STOCK, "architectures": architectures})
    assert f'model = {auto}.from_pretrained("path/to/this/directory")' in text
    assert "plain transformers" in text
    assert "prunecli.load_model" not in text
    assert "trust_remote_code" not in text


def test_front_matter_is_carried():
    matter = "license: cc-by-nc-4.0\nbase_model: facebook/nllb-moe-54b\ntags:\n- nllb\nmetrics: [bleu]"
    source = f"---\n{matter}\n---\n# NLLB\n"
    made = card(source)
    assert yaml.safe_load(made.split("---\n")[1]) == {
        "license": "cc-by-nc-4.0",
        "base_model": "facebook/nllb-moe-54b",
        "library_name": "transformers",
        "tags": ["nllb", "prunecli", "pruned"],
    }


@pytest.mark.parametrize("text", ["", "---\nlicense: [\n---\n", "---\nd: 2020-13-45\n---\n"])
def test_damaged_front_matter_is_none(text):
    assert front_matter(text) == {}


HASH = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = {**STEP, "source": {"path": "org/name", "revision": HASH, "fingerprint": "sha256:abc"}}
LATER = {
    "command": "prune-heads",
    "arguments": {},
    "prunecli": "0.1.0",
    "source": {"path": "half", "fingerprint": "sha256:b"},
}


FINE_TUNED = "---\nbase_model: org/before\nbase_model_relation: finetune\n---\n"


@pytest.mark.parametrize(
    ("history", "source", "config", "expected"),
    [
        ((SNAPSHOT,), "", {}, "org/name"),
        ((SNAPSHOT,), FINE_TUNED, {}, "org/name"),  # what its own base is, its own card says
        ((SNAPSHOT, LATER), "", {}, "org/name"),
        ((SNAPSHOT, LATER), "---\nbase_model: org/name\n---\n", {}, "org/name"),
        ((STEP,), FINE_TUNED, {"_name_or_path": "other/one"}, "org/before"),
        ((STEP,), "---\nbase_model: [a/b, c/d]\n---\n", {}, ["a/b", "c/d"]),
        ((STEP,), "", {"_name_or_path": "org/na-me_1.5"}, "org/na-me_1.5"),
        *(
            ((STEP,), "", {"_name_or_path": path}, None)
            for path in ("/data/org/name", "./name", "output/checkpoint-500", "org/name/", "C:\\models", 3)
        ),
        (
            ({"command": "finetune", "arguments": {}, "prunecli": "0.1.0"},),
            "",
            {"_name_or_path": "org/name"},
            None,
        ),  # from scratch
    ],
)
def test_base_model(history, source, config, expected):
    matter = matter_of(card(source, {**STOCK, **config}, history=history))
    assert matter.get("base_model") == expected
    assert matter.get("base_model_relation") == ("finetune" if expected == "org/before" else None)


def test_a_sentence_transformers_model_stays_one():
    source = "---\nlibrary_name: sentence-transformers\n---\n"
    assert matter_of(card(source))["library_name"] == "sentence-transformers"
    call = 'SentenceTransformer("path/to/this/directory"'
    assert f"{call})" in card(source)
    assert f"{call}, trust_remote_code=True)" in card(source, UNEVEN)
    assert call not in card()
    for other in ("fairseq", "[1]"):
        assert matter_of(card(f"---\nlibrary_name: {other}\n---\n"))["library_name"] == "transformers"


ORIGINAL = "# Tiny\n\nSays *this*.\n\n---\n\n## How to use it\n\n    code  \n"


def test_the_original_text_stands_below_ours_once():
    first = card(f"---\nlicense: mit\n---\n\n{ORIGINAL}")
    assert first.endswith(f"\n# Original model card\n\n{ORIGINAL.strip()}\n")
    second = card(first, history=(STEP, LATER))
    assert second.endswith(f"\n# Original model card\n\n{ORIGINAL.strip()}\n")
    assert second.count("# Original model card") == second.count("Says *this*") == 1
    assert second.count("## How it was made") == 1
    assert "2. `prune-heads` of prunecli 0.1.0" in second
    assert card(second, history=(STEP, LATER, LATER)).count("Says *this*") == 1


@pytest.mark.parametrize("text", ["---\nlicense: mit\n", "\ufeff---\nlicense: mit\n---\nText"])
def test_odd_front_matter_does_not_lose_the_text(text):
    assert card(text).rstrip().endswith(text.splitlines()[-1])
