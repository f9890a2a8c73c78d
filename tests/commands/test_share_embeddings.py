from pathlib import Path

import numpy as np
import pytest

from prunecli import demo
from prunecli.commands.inspect import inspect
from prunecli.commands.share import factorize_embeddings
from tests.commands.calls import both, call, names, refusals, refused
from tests.contracts.method_contract import logits
from tests.families import tiny_family
from tests.ffn_layouts import weights
from tests.pictures import pixels
from tests.tiny import config_of, tiny_nllb_moe, write_files

FREE = "--map-dim 4 --depth 2 --max-groups 2 --epochs 1"
SMALL = f"{FREE} --expand-dim 12"


run, done = both(factorize_embeddings)


@pytest.fixture
def model(models):
    return models["gpt2"]


@pytest.fixture(autouse=True)
def _text():
    Path("lines").write_text("the hat\nthe hen\n")
    write_files("data", {"train.eng": "the hat\n", "train.deu": "ein hut\n", "test.eng": "no\n"})


def test_the_demo_model_without_any_option():
    result = done("--epochs 0")
    result.says(
        "No checkpoint given: using the bundled demo model.",
        "Factorising both sides (default); input and output share a table.",
        "Not given, so: --map-dim 8, --expand-dim 128.",
        "Every token counts alike",
    )
    assert "Written: factorised-embeddings (opens only where prunecli is installed: " in result.out
    assert np.isfinite(logits("factorised-embeddings").numpy()).all()


def test_shared_blocks_and_no_reduction(model):
    found = done(model, FREE, "--shared-blocks --no-reduction --json --quiet").json
    rows, width = weights(model)["transformer.wte.weight"].shape
    unit = found["embedding"]["input"]
    assert (unit["expand_dim"], unit["shared_blocks"], unit["reduction"]) == (width, True, False)
    inner = (4 + width) // 2 // 2 * 2
    after = rows * 4 + (2 * inner // 2 + inner) + ((4 + inner) * width + width) + 4 * width
    assert found["embedding_parameters_after"] == after
    assert "one block a layer, no reduction" in call(inspect, "factorised-embeddings").out
    refused(run(model, SMALL, "--no-reduction --force"), f"Give --expand-dim {width}, or leave it out")


@pytest.mark.parametrize(
    ("options", "described"),
    [
        ("--text lines", {"text": ["lines"], "lines": 2}),
        ("--data data --split test,train --langs eng", {"langs": ["eng"], "lines": 2}),
    ],
)
def test_text_weighs_tokens(model, options, described):
    assert "counts alike" not in done(model, SMALL, options, "-o weighed").err
    run(model, SMALL, "-o plain --quiet")
    maps = [weights(name)["transformer.wte.map.weight"] for name in ("weighed", "plain")]
    assert not np.array_equal(*maps)
    step = config_of("weighed")["prunecli"]["history"][0]
    assert described.items() <= step["arguments"].items()


def test_a_dry_run_fits_and_writes_nothing(model):
    before = names()
    result = done(model, SMALL, "--dry-run")
    assert "Dry run: nothing is fitted or written." in result.out
    assert "explained variance" not in result.out
    assert names() == before
    written, planned = (run(model, SMALL, more, "--json").json for more in ("", "--dry-run"))
    assert written["parameters_after"] == planned["parameters_after"]
    assert written["bytes_after"] == planned["bytes_after"]


@pytest.mark.parametrize("options", ["--side input", "--cache"])
def test_embeddings_that_grow_are_a_warning_with_the_numbers(options):
    """The model shares its table (the demo: 807 rows of 64), before anything is fitted; with --quiet too."""
    result = done(demo.CHECKPOINT, "--dry-run --json --quiet", options)
    after = result.json["embedding_parameters_after"]
    grown = f"51,648 -> {after:,} parameters ({after / 51_648:.1%})"
    assert f"Warning: the embeddings grow, {grown}." in result.err
    assert len(result.err.splitlines()) == 2


def test_embeddings_that_shrink_or_are_only_cached_are_no_warning(model):
    result = run(demo.CHECKPOINT, "-o unit --epochs 0 --quiet")
    assert (result.status, result.err, result.out) == (0, "", "")
    assert "Warning" not in run("unit --cache --dry-run").err


@pytest.mark.parametrize("options", [f"{SMALL} --kind define", f"{FREE} --no-reduction"])
def test_draws_correlations(model, options):
    """The correlations are those of the tables, of the layers, and of the groups of a layer."""
    done(model, options, "--plot maps.png")
    pixels("maps.png")


def test_a_mixture_of_experts():
    done(tiny_nllb_moe("moe", shards=2, dtype="F16"), "--map-dim 4 --epochs 1 -o unit")
    held = weights("unit")
    assert {held[name].dtype for name in held if name.startswith("model.shared.")} == {np.dtype(np.float16)}


@refusals(
    ("--map-dim 33", "The map dimension 33 is above the model's width 32"),
    ("--map-dim 32 --kind projective", "The map dimension 32 is the model's width"),
    ("--split train", "--split and --langs go with --data."),
    ("--plot drawn.png", "drawn.png: exists already", 1),
    ("--side output --plot maps.png", "--plot draws the unit of the input side"),
    ("--side output --kind define", "--kind is for a unit that expands"),
    ("--kind projective --depth 3", "--depth is for a unit that expands"),
)
def test_refusals(refusal, model):
    Path("drawn.png").write_text("mine")
    before = names()
    refusal(run, model)
    assert names() == before
    assert Path("drawn.png").read_text() == "mine"


def test_a_tokenizer_of_another_model_is_refused(model):
    source = tiny_family("source", "gpt2", vocab_size=20)
    refused(run(source, SMALL, "--text lines"), "table has 20 rows", 1)
