"""What is said of failures, those of transformers at work and of figures that cannot be among them."""

import errno

import pytest

from prunecli.commands import failures
from prunecli.errors import CheckpointError, UsageError, damaged
from prunecli.results.inspection import Way
from tests.families import tiny_family
from tests.fuzz.rounds import run
from tests.tiny import change_config


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (CheckpointError("model: bad", "Do this."), "Error: model: bad\nDo this.", 1),
        (UsageError("--ratio 2: no"), "Error: --ratio 2: no", 2),
        (OSError(errno.ENOSPC, "full", "out/x"), "no space left on the disk (out/x)", 1),
        (PermissionError(errno.EACCES, "no", "out/x"), "no permission (out/x).\nChange the permissions", 1),
        (OSError(errno.ECONNRESET, "Reset"), "Error: Reset.\nRun the same", 1),
        (RuntimeError(f"{failures.LOOP}'x'"), "('x').\nCheck this path", 1),
        (CheckpointError("model: no config.json"), "model: no config.json\nFetch or copy the checkpoint", 1),
        (MemoryError(), "out of memory", 1),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling …"),
            "out of memory on ",  # the device, or the GPU of this machine
            1,
        ),
        (KeyboardInterrupt(), "Interrupted", 130),
    ],
)
def test_failures_become_plain_lines(error, text, status):
    said, ended = failures.describe(error)
    assert text in said
    assert ended == status
    assert len(said.splitlines()) <= 2


def test_names_in_other_libraries_messages_are_no_options():
    with pytest.raises(CheckpointError) as caught, damaged("model: damaged", "Copy it."):
        raise ValueError("`get_seq_length` failed")
    assert failures.describe(caught.value)[0].startswith(
        "Error: model: damaged (ValueError: 'get_seq_length' failed)"
    )


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        failures.describe(ZeroDivisionError())


def test_a_figure_that_no_result_holds_is_said():
    with pytest.raises(ValueError, match="1 validation error") as caught:
        Way.model_validate({"dtype": "float32", "weight_bytes": 1, "needed_bytes": -3, "fits": True})
    said, status = failures.describe(caught.value)
    assert said.startswith("Error: needed_bytes of the result comes out as -3: ")
    assert (len(said.splitlines()), status) == (2, 1)


def test_a_config_that_transformers_makes_and_cannot_run(tmp_path):
    """T5 divides by the logarithm of this distance at work, and looks at no value before."""
    change_config(tiny_family(tmp_path / "model", "t5"), relative_attention_max_distance=0)
    (tmp_path / "data").mkdir()
    for language in ("de", "en"):
        (tmp_path / "data" / f"val.{language}").write_text("a hen\n" * 40)
    ran = run("score-heads model --data data --pairs de-en --split val -o out.json", tmp_path)
    assert ran.status == 1
    assert "ValueError: math domain error" in ran.err.splitlines()[-2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]


def test_a_link_that_leads_to_itself(tmp_path):
    (tmp_path / "loop.json").symlink_to("loop.json")
    for command in ("compare-heads loop.json heads.json", "inspect loop.json", "report loop.json"):
        ran = run(command, tmp_path)
        assert ran.status == 1, ran.trace
        assert "loop.json" in ran.err.splitlines()[0]
