import os
from pathlib import Path

import pytest

from prunecli.errors import OutputError, UsageError
from prunecli.recipes.engine import Step
from prunecli.recipes.run import (
    HASHED_WHOLE_BYTES,
    identity,
    page_step,
    preview,
    read_state,
    run_steps,
    stale_reason,
    state_file,
)
from tests.recipes.example import KEEPING, resolved


class Worker:
    """Writes each step's outputs; remembers what it ran."""

    def __init__(self, fail=()):
        self.ran, self.replaced, self.fail = [], [], fail

    def __call__(self, step, replace):
        self.ran.append(step.name)
        self.replaced += [step.name] if replace else []
        if step.name in self.fail:
            return 3
        for output in step.outputs:
            output.write_text(" ".join(step.arguments))
        return 0


def run(worker=None, force=False, **overrides):
    worker = Worker() if worker is None else worker
    outcomes = run_steps(resolved(**overrides), state_file(Path("recipe.yaml")), worker, force=force)
    return worker, outcomes


def test_a_second_run_makes_what_was_lost_alone():
    worker, outcomes = run()
    assert worker.ran == ["gates", "prune-language", "prune-global", "evaluate"]
    assert worker.replaced == []
    os.utime("text/val.a", (1, 1))
    again, outcomes = run()
    assert again.ran == []
    assert [outcome.reason for outcome in outcomes] == [None] * 4
    Path("made/global").unlink()
    assert run()[0].ran == ["prune-global"]


def test_a_changed_argument_runs_its_step_and_those_after_it():
    run()
    worker, outcomes = run(ratio="0.5")
    assert worker.ran == worker.replaced == ["prune-language", "prune-global", "evaluate"]
    assert outcomes[1].reason == "its arguments or the version of prunecli changed"
    assert outcomes[-1].reason == "made/language, made/global changed"


def test_a_changed_input_runs_what_reads_it_and_stops_where_the_output_is_the_same():
    run()
    Path("text/val.a").write_text("two\n")
    worker, outcomes = run()
    assert worker.ran == ["gates"]
    assert outcomes[0].reason == "text changed"


def test_outputs_of_others_are_refused_before_any_step():
    Path("made").mkdir()
    Path("made/evaluation.json").write_text("mine")
    worker = Worker()
    with pytest.raises(OutputError, match=r"evaluation.json exists, and was not made by"):
        run(worker)
    assert worker.ran == []
    assert run(worker, force=True)[1][-1].status == 0


def test_outputs_that_were_changed_by_hand_are_refused():
    run()
    Path("made/global").write_text("mended by hand")
    with pytest.raises(OutputError, match="made/global changed after this recipe's step 'prune-global'"):
        run()


def test_a_failure_stops_the_run_and_the_next_run_goes_on_there():
    worker, outcomes = run(Worker(fail=["prune-global"]))
    assert (outcomes[-1].step.name, outcomes[-1].status) == ("prune-global", 3)
    assert "evaluate" not in worker.ran
    assert run()[0].ran == ["prune-global", "evaluate"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "prunecli.run/1", "steps": {"a": 1}}'])
def test_a_damaged_state_is_as_good_as_none(text):
    path = Path("state.json")
    path.write_text(text)
    assert read_state(path) is None


def test_identity_follows_names_and_content_but_not_hidden_or_excluded_files():
    base = Path("base")
    first = identity(base)
    (base / ".cache").write_text("x")
    assert identity(base) == first
    (base / "out.json").write_text("x")
    assert identity(base) != first
    assert identity(base, exclude=[base / "out.json"]) == first
    (base / "out.json").rename(base / "config2.json")
    renamed = identity(base)
    (base / "config2.json").write_text("y")
    assert identity(base) != renamed
    assert identity(Path("nothing")) is None


def test_large_files_of_a_directory_are_told_apart_by_size_and_time():
    weights = Path("base/model.safetensors")
    with weights.open("wb") as file:
        file.truncate(HASHED_WHOLE_BYTES + 1)
    os.utime(weights, (1, 1))
    first = identity(Path("base"))
    os.utime(weights, (2, 2))
    assert identity(Path("base")) != first


def test_what_lies_beside_an_output_is_the_commands_own_to_replace():
    Path("model.steps").mkdir()  # of an interrupted run, which the command goes on with
    replaced = []

    def train(step, replace):
        replaced.append(replace)
        Path("model.steps/1").mkdir(parents=True, exist_ok=True)
        step.outputs[0].touch()
        return 0

    def run_again():
        return [outcome.reason for outcome in run_steps(resolved(KEEPING), Path("state.json"), train)]

    assert run_again() == ["model does not exist", "scores does not exist"]
    assert replaced == [False, False]
    assert run_again() == [None, None]
    Path("model.steps/1").rmdir()
    Path("model.steps").rmdir()
    assert run_again()[0] == "model.steps does not exist"


def test_a_preview_knows_what_lies_beside_an_output():
    reasons = [outcome.reason for outcome in preview(resolved(KEEPING), {})]
    assert reasons == ["model does not exist", "model.steps/1 is made anew"]


def test_it_reads_what_the_steps_write_and_names_the_checkpoints_they_began_with():
    step = page_step(resolved(), Path("page.html"))
    assert (step.command, step.outputs) == ("report", (Path("page.html"),))
    # `text`, which the first step reads as well, is no checkpoint.
    assert step.arguments == ("--original", "base", "--output", "page.html", "--", "made")
    made = [Path("made") / name for name in ("gates.json", "language", "global", "evaluation.json")]
    assert step.inputs == (*made, Path("base"))


@pytest.mark.parametrize("page", ["made", "made/language", "made/language/page.html"])
def test_what_is_in_the_way_is_named(page):
    with pytest.raises(UsageError, match=r"html=.*made/.* of the recipe is in the way"):
        page_step(resolved(), Path(page))


@pytest.mark.parametrize("outputs", [(), ("/elsewhere/a", "made")])
def test_outputs_in_no_one_folder_are_refused(outputs):
    with pytest.raises(UsageError, match="in no one folder"):
        page_step([Step("a", "prune", (), outputs=tuple(map(Path, outputs)))], Path("page.html"))


def test_steps_without_output_always_run():
    assert stale_reason(Step("a", "inspect", ()), {}) == "it writes no file"


def test_a_step_that_writes_nothing_is_an_error():
    with pytest.raises(OutputError, match="step 'gates' ended well but did not write made"):
        run(lambda step, replace: 0)
