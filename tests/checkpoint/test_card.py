"""The model card: what it says, and that its front matter is YAML."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from prunecli.checkpoint.card import front_matter, model_card
from prunecli.checkpoint.structure import FfnChange, Structure

LAYER = "model.encoder.layers.3.ffn"
STEP = {
    "command": "prune-experts",
    "arguments": {"ratio": 0.5, "metric": "importance", "source": ["eng_Latn"]},
    "prunecli": "0.1.0",
    "source": {"path": "nllb-moe-54b", "fingerprint": "sha256:abc"},
    "statistics": [{"file": "gates.json", "sha256": "def"}],
}
STOCK = {"auto_map": {"AutoModelForSeq2SeqLM": "modeling_prunecli.PrunecliModel"}}
UNEVEN = {"auto_map": {**STOCK["auto_map"], "AutoConfig": "modeling_prunecli.PrunecliConfig"}}


def card(front: dict[str, Any] | None = None, config: dict[str, Any] = STOCK, **fields: Any) -> str:
    values = {"experts": {LAYER: (1, 5)}, "original_experts": {LAYER: 8}, "history": (STEP,), **fields}
    return model_card(Structure(**values), config, front or {}, (1000, 400), (4000, 800))


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


def test_says_how_to_load() -> None:
    assert "prunecli.load_model(" in card()
    assert (
        'transformers.AutoModelForSeq2SeqLM.from_pretrained("path/to/this/directory", trust_remote_code=True)'
        in card()
    )
    assert 'AutoTokenizer.from_pretrained("path/to/this/directory")' in card()
    assert 'AutoTokenizer.from_pretrained("path/to/this/directory", trust_remote_code=True)' in card(
        config=UNEVEN
    )


def test_long_lists_are_cut() -> None:
    text = card(experts={LAYER: tuple(range(0, 128, 2))}, original_experts={LAYER: 128})
    assert "| 0 2 4 6 8 10 12 14 … 112 114 116 118 120 122 124 126 |" in text


def test_heads_that_were_removed() -> None:
    name = "model.encoder.layers.0.self_attn"
    text = card(heads={name: (), LAYER: (3,)}, original_heads={name: 4, LAYER: 4})
    assert "1 of 8 heads are left in these attentions." in text
    assert f"| `{name}` | 0 | 4 | 100.0% | none |" in text
    assert "## Heads" not in card()


def test_ffns_that_were_shared_and_removed() -> None:
    names = [f"model.encoder.layers.{number}.ffn" for number in (0, 2)]
    ffn = {names[1]: FfnChange(shared_with=names[0]), "model.decoder.layers.0.ffn": FfnChange(removed=True)}
    config = {**UNEVEN, "model_type": "prunecli-nllb-moe", "encoder_layers": 3, "decoder_layers": 1}
    text = card(ffn=ffn, config=config)
    assert "FFN: encoder 2 shares layer 0's; decoder 0 removed." in text
    assert "## Feed-forward networks" not in card()


def test_one_statistics_file_may_stand_alone() -> None:
    text = card(history=({**STEP, "statistics": STEP["statistics"][0]},))  # type: ignore[index]
    assert "statistics: `gates.json`, sha256 def" in text


def test_nothing_removed() -> None:
    text = model_card(Structure(), {}, {}, (10, 10), (40, 40))
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
    made = card(front_matter(source))
    assert yaml.safe_load(made.split("---\n")[1]) == {
        "license": "cc-by-nc-4.0",
        "base_model": "facebook/nllb-moe-54b",
        "library_name": "transformers",
        "tags": ["nllb", "prunecli", "pruned"],
    }


def test_odd_values_stay_yaml() -> None:
    front = front_matter("---\nlicense: 2020-01-01\nlanguage: [no, 'yes', \"a: b\"]\ntags: nllb\n---\n")
    matter = yaml.safe_load(card(front).split("---\n")[1])
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
