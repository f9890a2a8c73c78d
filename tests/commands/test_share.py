from pathlib import Path

import pytest

from prunecli.commands.prune import prune_ffn
from prunecli.commands.share import share_attention, share_ffn
from prunecli.model.checkpoint import open_model
from prunecli.model.opening import shim_classes
from tests.commands.calls import both, call, names, refusals, refused
from tests.contracts.method_contract import written
from tests.ffn_layouts import tiny
from tests.selections import kept_heads

ENCODER, DECODER = "model.encoder.layers.{}", "model.decoder.layers.{}"
"""Of m2m_100: 3 and 2 layers of 4 heads, FFNs of 48 hidden units, d_model 32."""


run, done = both(share_ffn)
share, shared = both(share_attention)


@pytest.fixture(scope="module")
def models(shared_path):
    cases = ("m2m_100", "gpt2", "bert", "llama", "nllb-moe", "gemma2", "t5")
    return {case: tiny(shared_path / case, case) for case in cases}


@pytest.fixture
def model(models):
    return models["m2m_100"]


def owners(directory: str, part: str) -> dict[str, str | None]:
    """FFN or attention -> the one whose tensors it runs, None where it is gone; checks the checkpoint."""
    opened = open_model(directory)
    opened.check()
    layers = getattr(opened.layout, part)
    return {layer.name: None if layer.removed else layer.owner for layer in layers}


def test_without_options_the_choices_are_said(model):
    result = done(model)
    result.says("No --preset given: SharedEncNoDec.", "No --init given: a shared FFN is the mean")
    assert "Written: shared-ffn (opens only where prunecli is installed: prunecli.load_model" in result.out
    assert owners("shared-ffn", "ffns") == {
        **{ENCODER.format(n): ENCODER.format(0) for n in range(3)},
        **{DECODER.format(n): None for n in range(2)},
    }
    made = open_model("shared-ffn")
    assert shim_classes(made.config)
    assert made.structure.history[-1]["arguments"] == {"preset": "SharedEncNoDec", "seed": 0}
    assert made.structure.fingerprints() == (open_model(model).fingerprint,)


def test_without_options_the_choices_for_attentions_are_said(model):
    result = shared(model)
    result.says("No --preset given: SharedEncSharedDec.", "No --init given: a shared attention is the mean")
    assert "Not a stock model: attentions are shared" in result.out
    encoder, decoder = f"{ENCODER}.self_attn", f"{DECODER}.self_attn"
    cross = f"{DECODER}.encoder_attn"
    assert owners("shared-attention", "attentions") == {
        **{encoder.format(n): encoder.format(0) for n in range(3)},
        **{decoder.format(n): decoder.format(0) for n in range(2)},
        **{cross.format(n): cross.format(n) for n in range(2)},
    }
    made = open_model("shared-attention")
    assert shim_classes(made.config)
    assert made.structure.history[-1]["arguments"] == {"preset": "SharedEncSharedDec"}


def test_json_of_a_dry_run(model):
    summary = done(model, "--preset OneWide --dry-run --json").json
    assert names() == []
    (group,) = summary["groups"]
    assert (group["owner"], group["width"], group["init"]) == (ENCODER.format(0), 5 * 48, "concat")
    assert group["parameters"] == 2 * 32 * 240 + 240 + 32
    assert len(group["sources"]) == 3
    assert summary["removed"] == [DECODER.format(0), DECODER.format(1)]
    # As many hidden units as before; the biases of four outputs and two norms are gone.
    assert summary["parameters_before"] - summary["parameters_after"] == 4 * 32 + 2 * 64
    assert summary["output"] is None


def test_json_of_a_dry_run_for_attentions(model):
    """(N - 1) x 4 x d_model^2 by sharing, N x 4 x d_model^2 by dropping, biases, and the norms of what is dropped."""
    summary = shared(model, "--encoder share --decoder drop --init last", "--dry-run --json").json
    assert names() == []
    members = [f"{ENCODER}.self_attn".format(n) for n in range(3)]
    made = {"init": "last", "heads": [0, 1, 2, 3], "parameters": 4 * 32 * 32 + 4 * 32}
    of = {"owner": members[0], "members": members, "sources": members[2:]}
    assert summary["groups"][0] == {**of, **made}
    assert summary["removed"] == [f"{DECODER}.self_attn".format(n) for n in range(2)]
    saved = summary["parameters_before"] - summary["parameters_after"]
    assert saved == 4 * (4 * 32 * 32 + 4 * 32) + 2 * 2 * 32
    assert summary["output"] is None


def test_layers_share_with_those_of_their_window(models):
    shared(models["gemma2"], "-o out").says(
        "layers of their own window alone (full_attention, sliding_attention)."
    )
    names = [f"model.layers.{n}.self_attn" for n in range(3)]
    assert list(owners("out", "attentions").values()) == [names[0], names[1], names[0]]


def test_the_table_says_what_is_made(model):
    texts = ("encoder 0-2", "mean of 3", "cross 0-1", "as before, one each", "decoder 0-1", "none", "Dry run")
    shared(model, "--preset SharedEncNoDec --dry-run").shows(*texts)


def test_the_history_names_no_stack_that_the_model_lacks(models):
    done(models["llama"], "--decoder share -o shared")
    arguments = open_model("shared").structure.history[-1]["arguments"]
    assert arguments["decoder"] == "share"
    assert "encoder" not in arguments


def test_the_demo_without_any_argument():
    done().says("using the bundled demo model", "only its dense FFNs are changed (--dense-only)")
    assert names() == ["shared-ffn"]


def test_a_reduced_checkpoint_is_reduced_further(model):
    done(model, "--preset SharedEnc -o one")
    assert "shared, as before" in done("one --preset NoDec -o two").out
    refused(run("two --preset SharedDec -o no"), "no FFN left to share")
    shared(model, "--encoder drop -o none")
    refused(share("none --encoder share"), "no encoder self-attention left to share")
    shared(model, "--encoder share -o alike")
    refused(share("alike --encoder share --groups 3"), "share one attention already and would be parted")


def test_activations_are_those_of_the_merged_ffn(models):
    """The FFN is merged, and then narrowed; activations are no means of its sources'."""
    Path("text").write_text("ab cd\nefg\n")
    text = "--width 20 --text text"
    done(models["gpt2"], text, "--keep-units activations -o at-once")
    done(models["gpt2"], "-o merged")
    call(prune_ffn, "merged", text, "--metric activation -o narrowed")
    one = open_model("at-once")
    other = open_model("narrowed")
    assert list(one.tensors) == list(other.tensors)
    assert all(one.read(name).tobytes() == other.read(name).tobytes() for name in one.tensors)


@refusals(
    ("{gpt2} --preset NoEnc", "with decoder.\nIt can be: No, NoDec, OneWide, Shared, SharedDec."),
    ("{bert} --decoder drop", "--decoder drop: the model has no decoder"),
    ("{m2m_100} --encoder share --groups 2", "different sizes.\nChoose one of 1, 3."),
    ("{m2m_100} --encoder share --groups 4", "more groups than layers"),
    ("{m2m_100} --preset SharedEncDec --groups 1,1", "share the same FFNs"),
    ("{m2m_100} --preset NoDec --width 8", "--width is for shared FFNs"),
    ("{m2m_100} --preset SharedEnc --keep-units norms", "--keep-units: no FFN gets narrower"),
    ("{m2m_100} --preset SharedEnc --data .", "no text is read here"),
    ("{gpt2} --width 8", "needs text.\nGive --text FILE"),
    (f"{{m2m_100}} --keep-units activations --width 8 --text {__file__}", "--text goes with"),
)
def test_refusals(refusal, models):
    refusal(lambda line: run(line.format(**models)))
    assert names() == []


@refusals(
    ("{gpt2} --cross share", "--cross share: the model has no cross-attention"),
    ("{gpt2} --encoder drop", "--encoder drop: the model has no encoder self-attention"),
    ("{m2m_100} --encoder share --groups 2", "3 layers of encoder self-attention to share"),
    ("{m2m_100} --encoder share --groups x", "--groups x: must be a valid integer"),
    ("{m2m_100} --encoder drop --init last", "--init is for shared attentions"),
    ("{m2m_100} --preset OneWide", "no such configuration"),
)
def test_refusals_for_attentions(refusal, models):
    refusal(lambda line: share(line.format(**models)))
    assert names() == []


def test_numbers_of_heads_must_be_equal(model, models):
    first, second = (f"{ENCODER}.self_attn".format(n) for n in range(2))
    uneven = written(model, kept_heads({first: (0, 1), second: (2,)}), "uneven")
    refused(share(uneven, "--encoder share"), "different numbers of heads (1, 2, 4)")
    name = "encoder.block.{}.layer.0.SelfAttention"
    kept = kept_heads({name.format(n): (n, 3) for n in range(3)})
    others = written(models["t5"], kept, "others")
    refused(share(others, "--encoder share"), "positions of its own")
    shared(others, "--encoder share --init last -o last")
    attentions = open_model("last").layout.attentions
    assert {layer.heads for layer in attentions if layer.kind == "encoder"} == {(2, 3)}
