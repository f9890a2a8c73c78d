"""The model card: what it says, and that its front matter is YAML."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prunecli.architectures import FAMILIES
from prunecli.model.card import model_card
from prunecli.model.layout import resolve
from prunecli.model.source_card import front_matter
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
STOCK = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
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
    layout = resolve(FAMILIES[config["model_type"]], config, Structure(**values))
    return model_card(layout, source, 400, 800)


def matter_of(text: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text.split("---\n")[1]))


def test_says_what_was_removed_from_what_and_how() -> None:
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


def test_sizes_after_several_steps_are_relative_to_the_original() -> None:
    tuned = {
        "command": "finetune",
        "source": {"path": "half", "fingerprint": "sha256:b"},
        "before": {"parameters": 400, "bytes": 800},
    }
    text = card(history=(STEP, tuned))
    assert "| parameters | 1,000 | 400 | 40.0% |" in text
    of_old = {key: value for key, value in STEP.items() if key != "before"}
    assert "| parameters |" not in card(history=(of_old, tuned))
    scratch = {"command": "finetune", "arguments": {"from_scratch": "bart"}}
    assert "| parameters | 1,000 | 400 | 40.0% |" in card(history=(scratch, STEP, tuned))


def test_only_a_model_that_was_trained_and_not_reduced_is_called_trained() -> None:
    tuned, trimmed = ({**STEP, "command": command} for command in ("finetune", "trim-vocabulary"))
    assert "# nllb-moe-54b, trained" in card(history=(tuned, tuned), axes={})
    assert "# nllb-moe-54b, pruned" in card(history=(trimmed, tuned), axes={})


def test_says_how_to_load() -> None:
    text = card(config=UNEVEN)
    assert 'prunecli.load_model("path/to/this/directory")' in text
    assert 'AutoTokenizer.from_pretrained("path/to/this/directory")' in text
    assert "Not a stock model: experts differ." in text
    assert (
        "`from_pretrained(…, trust_remote_code=True)` of transformers' `AutoModel`, `AutoModelForSeq2SeqLM`"
        in text
    )


@pytest.mark.parametrize(
    ("architectures", "auto"),
    [
        (["BartForConditionalGeneration"], "AutoModelForSeq2SeqLM"),
        (["BartModel"], "AutoModel"),
        (["BartForSequenceClassification"], "AutoModelForSequenceClassification"),
        ([], "AutoModelForSeq2SeqLM"),
    ],
)
def test_a_stock_model_needs_no_prunecli(architectures: list[str], auto: str) -> None:
    text = card(config={**STOCK, "architectures": architectures})
    assert f'model = {auto}.from_pretrained("path/to/this/directory")' in text
    assert "plain transformers" in text
    assert "prunecli.load_model" not in text
    assert "trust_remote_code" not in text


def test_long_lists_are_cut() -> None:
    text = card(axes=axes_of("expert", {LAYER: range(0, 128, 2)}, 128))
    assert "| 0 2 4 6 8 10 12 14 … 112 114 116 118 120 122 124 126 |" in text


def test_heads_that_were_removed() -> None:
    name = "model.encoder.layers.0.self_attn"
    text = card(axes=axes_of("head", {name: (), LAYER: (3,)}, 4))
    assert "1 of 8 heads are left in these attentions." in text
    assert f"| `{name}` | 0 | 4 | 100.0% | none |" in text
    assert "## Heads" not in card()


def test_ffns_that_were_shared_and_removed() -> None:
    names = [f"model.encoder.layers.{number}.ffn" for number in (0, 2)]
    removed = frozenset({"model.decoder.layers.0.ffn"})
    config = {**UNEVEN, "encoder_layers": 3, "decoder_layers": 1}
    text = card(shared={names[1]: names[0]}, removed=removed, config=config)
    assert "FFN: encoder 2 shares layer 0's; decoder 0 removed." in text
    assert "## Feed-forward networks" not in card()


def test_one_statistics_file_may_stand_alone() -> None:
    text = card(history=({**STEP, "statistics": STEP["statistics"][0]},))  # type: ignore[index]
    assert "statistics: `gates.json`, sha256 def" in text


def test_nothing_removed() -> None:
    text = model_card(resolve(FAMILIES["bart"], STOCK, Structure()), "", 10, 40)
    assert "# Pruned checkpoint" in text
    assert "## Experts" not in text
    assert "## How it was made" not in text


def test_several_steps_are_in_order() -> None:
    second = {**STEP, "source": {"path": "half", "fingerprint": "sha256:123"}}
    text = card(history=(STEP, second))
    assert (
        text.index("1. `prune-experts`")
        < text.index("from `nllb-moe-54b`")
        < text.index("2. `prune-experts`")
    )


def test_front_matter_is_carried() -> None:
    matter = "license: cc-by-nc-4.0\nbase_model: facebook/nllb-moe-54b\ntags:\n- nllb\nmetrics: [bleu]"
    source = f"---\n{matter}\n---\n# NLLB\n"
    made = card(source)
    assert yaml.safe_load(made.split("---\n")[1]) == {
        "license": "cc-by-nc-4.0",
        "base_model": "facebook/nllb-moe-54b",
        "library_name": "transformers",
        "tags": ["nllb", "prunecli", "pruned"],
    }


def test_odd_values_stay_yaml() -> None:
    source = "---\nlicense: 2020-01-01\nlanguage: [no, 'yes', \"a: b\"]\ntags: nllb\n---\n"
    matter = matter_of(card(source))
    assert matter["license"] == "2020-01-01"
    assert matter["language"] == [False, "yes", "a: b"]
    assert matter["tags"] == ["prunecli", "pruned"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# no front matter",
        "---\nlicense: mit\n",
        "---\nlicense: [\n---\n",
        "---\n- a\n---\n",
        "---\nd: 2020-13-45\n---\n",
    ],
)
def test_damaged_front_matter_is_none(text: str) -> None:
    assert front_matter(text) == {}


HASH = "0123456789abcdef0123456789abcdef01234567"
SNAPSHOT = {**STEP, "source": {"path": "org/name", "revision": HASH, "fingerprint": "sha256:abc"}}
LATER = {"command": "prune-heads", "prunecli": "0.1.0", "source": {"path": "half", "fingerprint": "sha256:b"}}


def test_a_snapshot_is_titled_by_its_repository() -> None:
    text = card(history=(SNAPSHOT,))
    assert "# org/name, pruned" in text
    assert f"- from `org/name` at {HASH}, sha256:abc" in text
    inside = {**SNAPSHOT, "source": {**SNAPSHOT["source"], "subfolder": "0_Transformer"}}
    assert "# org/name/0_Transformer, pruned" in card(history=(inside,))


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
        ((STEP,), "", {"_name_or_path": "/data/org/name"}, None),
        ((STEP,), "", {"_name_or_path": "./name"}, None),
        ((STEP,), "", {"_name_or_path": "../name"}, None),
        ((STEP,), "", {"_name_or_path": "output/checkpoint-500"}, None),
        ((STEP,), "", {"_name_or_path": "mine/checkpoint-500"}, None),
        ((STEP,), "", {"_name_or_path": "org/name/"}, None),
        ((STEP,), "", {"_name_or_path": "C:\\models"}, None),
        ((STEP,), "", {"_name_or_path": "name"}, None),
        ((STEP,), "", {"_name_or_path": 3}, None),
        (
            ({"command": "finetune", "prunecli": "0.1.0"},),
            "",
            {"_name_or_path": "org/name"},
            None,
        ),  # from scratch
    ],
)
def test_base_model(history: Any, source: str, config: dict[str, Any], expected: Any) -> None:
    matter = matter_of(card(source, {**STOCK, **config}, history=history))
    assert matter.get("base_model") == expected
    assert matter.get("base_model_relation") == ("finetune" if expected == "org/before" else None)


def test_a_sentence_transformers_model_stays_one() -> None:
    source = "---\nlibrary_name: sentence-transformers\n---\n"
    assert matter_of(card(source))["library_name"] == "sentence-transformers"
    call = 'SentenceTransformer("path/to/this/directory"'
    assert f"{call})" in card(source)
    assert f"{call}, trust_remote_code=True)" in card(source, UNEVEN)
    assert call not in card()
    for other in ("fairseq", "[1]"):
        assert matter_of(card(f"---\nlibrary_name: {other}\n---\n"))["library_name"] == "transformers"


ORIGINAL = "# Tiny\n\nSays *this*.\n\n---\n\n## How to use it\n\n    code  \n"


def test_the_original_text_stands_below_ours_once() -> None:
    first = card(f"---\nlicense: mit\n---\n\n{ORIGINAL}")
    assert first.endswith(f"\n# Original model card\n\n{ORIGINAL.strip()}\n")
    second = card(first, history=(STEP, LATER))
    assert second.endswith(f"\n# Original model card\n\n{ORIGINAL.strip()}\n")
    assert second.count("# Original model card") == second.count("Says *this*") == 1
    assert second.count("## How it was made") == 1
    assert "2. `prune-heads` of prunecli 0.1.0" in second
    assert card(second, history=(STEP, LATER, LATER)).count("Says *this*") == 1


def test_a_result_of_a_model_without_card_has_no_original_text() -> None:
    first = card()
    assert "Original model card" not in first
    assert "Original model card" not in card(first, history=(STEP, LATER))


def test_a_card_that_the_user_wrote_over_ours_is_kept() -> None:
    assert card("# Mine\n", history=(STEP, LATER)).endswith("\n# Original model card\n\n# Mine\n")


@pytest.mark.parametrize(
    "text", ["---\nlicense: mit\n", "\ufeff---\nlicense: mit\n---\nText", "---\na: [\n---\nText"]
)
def test_odd_front_matter_does_not_lose_the_text(text: str) -> None:
    assert card(text).rstrip().endswith(text.splitlines()[-1])


def test_nobody_is_told_to_install_what_is_not_published() -> None:
    assert "pip install" not in card() + card(config=UNEVEN)
    assert "needs the Python package prunecli" in card(config=UNEVEN).replace("need ", "needs ")
