"""Steps of histories as they are shown: options as typed, everything else in a comment."""

import shlex
from types import SimpleNamespace

import pytest

from prunecli.commands.command import parameters
from prunecli.report.history import command_lines, step_text

DIGEST = "0123456789abcdef" * 4
REMOVED = "encoder:1,decoder:3,decoder:5"


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("prune-experts", {"ratio": 0.8, "keep": 51}, " --ratio 0.8  # keep 51"),
        (
            "prune-experts",
            {"experts_per_layer": {"decoder": 12, "encoder": 36}},
            " --experts-per-layer 36,12",
        ),
        ("prune-heads", {"removed": 10, "attention": ["cross", "x"]}, " --attention cross,x  # removed 10"),
        ("finetune", {"train": DIGEST, "valid": None, "best": 3}, "  # train 01234567…, best 3"),
        ("finetune", {"hidden": 0.5, "betas": [0.9, 0.98]}, " --hidden-weight 0.5  # betas 0.9,0.98"),
        ("finetune", {"valid": DIGEST, "from_scratch": "bart"}, " --from-scratch CONFIG  # valid 01234567…"),
        ("trim-vocabulary", {"keep": ["a", "b"], "cache": True, "no": False}, " --keep a,b --cache"),
        ("prune-layers", {"removed": {"encoder": [1], "decoder": [3, 5]}}, f" --remove {REMOVED}"),
        ("prune-layers", {"removed": {"decoder": [3]}, "count": 1}, " --count 1  # removed decoder:3"),
        ("prune-ffn", {"text": {"files": ["a b", "c"], "sha256": DIGEST}}, " --text 'a b' --text c"),
        ("prune-layers", {"removed": {"encoder": 1}, "text": 7}, " --remove encoder:1 --text 7"),
        ("finetune", {"teacher": {"path": "big", "fingerprint": "sha256:1"}}, " --teacher big"),
        ("odd", {"sum": f"sha256:{DIGEST}"}, "  # sum sha256:01234567…"),
        ("odd", {"a b": "x\ny"}, "  # a b x y"),
        ("odd", {"name": "it's; $HOME"}, """ --name 'it'"'"'s; $HOME'"""),
    ],
)
def test_a_step_is_shown_as_it_was_typed(command, arguments, expected):
    assert step_text({"command": command, "arguments": arguments}) == command + expected


@pytest.mark.parametrize(
    ("command", "field", "expected"),
    [
        ("prune-experts", "experts", "prune-experts --ratio 0.8  # 48 of 1,256 experts kept"),
        ("trim-vocabulary", "vocabulary", "trim-vocabulary --ratio 0.8  # 48 of 1,256 tokens kept"),
    ],
)
def test_what_was_kept_is_said_not_what_was_asked(command, field, expected):
    step = {"command": command, "arguments": {"ratio": 0.8}, field: {"before": 1256, "after": 48}}
    assert step_text(step) == expected
    assert step_text({**step, field: {"before": "many"}}) == f"{command} --ratio 0.8"


ARGUMENTS = {
    "prune-experts": "ratio experts_per_layer fit_bytes metric seed strategy balance min_per_layer round_to mtp active "
    "constant_experts granularity source target for dtype",
    "prune-heads": "ratio count removed attention min_per_layer uniform metric method normalize seed dtype",
    "prune-layers": "removed ratio count encoder decoder side metric contiguous seed dtype",
    "prune-ffn": "ratio width side per_layer score round_to dense_only seed dtype",
    "share-ffn": "config encoder decoder width init scale groups order keep_units dense_only dtype seed",
    "share-attention": "config encoder decoder cross groups order init dtype",
    "factorize-embeddings": "side kind map_dim expand_dim depth max_groups shared_blocks no_reduction cache split "
    "langs text_sha256 lines epochs dtype seed",
    "trim-vocabulary": "split langs min_count multiple_of dtype",
    "finetune": "task valid pairs batch_tokens accumulate learning_rate warmup betas clip_norm dtype eval_every metric "
    "beam teacher context dropout train part lora seed label_smoothing distill temperature hidden steps best "
    "from_scratch",
}
"""Command -> arguments that its step in a history may have, but for the text."""


@pytest.mark.parametrize("command", ARGUMENTS)
def test_every_option_is_one_of_the_command(command):
    arguments = dict.fromkeys(ARGUMENTS[command].split(), "x")
    if command in ("prune-layers", "prune-ffn", "share-ffn"):
        arguments["text"] = {"files": ["a"], "split": "val", "pairs": ["a-b"]}  # type: ignore[assignment]
    statistics = {"file": "f", "sha256": "1"}
    history = [{"command": command, "arguments": arguments, "statistics": statistics}]
    entry = SimpleNamespace(name="out", history=history)
    (line,) = command_lines(entry, [])  # type: ignore[arg-type]
    options = {word.removeprefix("--") for word in shlex.split(line, comments=True) if word.startswith("--")}
    assert options
    assert options <= parameters()[command].keys()


def test_steps_of_one_shrink_are_one_command():
    by = {"by shrink": "--params 0.5"}
    history = [
        {"command": "trim-vocabulary", "arguments": {"split": "val", **by}, "source": {"path": "big"}},
        {"command": "prune-layers", "arguments": {"ratio": 0.5, **by}, "source": {"path": "big"}},
        {"command": "prune-heads", "arguments": {"metric": "random", "pairs": []}, "source": {"path": "x"}},
    ]
    entry = SimpleNamespace(name="out", history=history, fingerprint=None)
    lines = command_lines(entry, [])  # type: ignore[arg-type]
    assert lines == [
        "prunecli shrink big --params 0.5 --data DATA --output x  # trim-vocabulary, prune-layers",
        "prunecli prune-heads x --metric random --output out",
    ]
