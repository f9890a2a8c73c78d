"""Several processes of one command: joined by gloo as torchrun would, equal to one, and one that dies."""

import signal
import time
from pathlib import Path

import pytest

from prunecli.commands.evaluate import evaluate
from prunecli.errors import OutputError
from prunecli.processes import neighbours, undisturbed
from tests.commands.calls import content, done
from tests.forked import ended, start
from tests.process_groups import at_once
from tests.tiny import tiny_nllb_moe, write_files


@pytest.fixture
def folder():
    tiny_nllb_moe("m", layers=2)
    lines = "the hen\na\nno hen on the hat\nten\nthe inn\nthe hat is in the inn\n"
    write_files("data", dict.fromkeys(("test.eng_Latn", "test.fra_Latn"), lines))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_what_is_made_of_shares_comes_back_in_order(count):
    items = list(range(7))
    found = at_once(count, lambda group: group.gather_shares([10 * item for item in group.share(items)]))
    assert found == [[10 * item for item in items]] * count


def test_where_one_fails_all_end():
    def work(group):
        with group.in_step():
            if group.rank == 1:
                raise OutputError("gates.json: exists already")

    first, second, third = at_once(3, work)
    assert isinstance(second, OutputError)
    assert str(first) == "process 0 of 3 stops: another one has failed"
    assert str(third) == "process 2 of 3 stops: another one has failed"


def test_who_shares_a_machine(monkeypatch):
    assert neighbours("cpu") == neighbours("cuda") == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert neighbours("cpu") == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert neighbours("cpu") == 4
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert neighbours("cuda") == 2


def test_a_signal_waits_for_what_must_be_whole():
    done = []

    def write():
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            done.append("written")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert done == ["written"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_is_heard_while_the_others_are_waited_for(folder):
    """The other is never started: torchrun ends the one that waits, which says so."""
    code = "from prunecli.commands.app import main; main(['collect-gates', 'm', '--data', 'data'])"
    waiting = (
        "import torch, sys\n"
        "real = torch.distributed.init_process_group\n"
        "def join(*arguments, **more):\n"
        "    open('joining', 'w').close()\n"
        "    real(*arguments, **more)\n"
        "torch.distributed.init_process_group = join\n"
    )
    first, second = start(code=waiting + code)
    second.process.kill()
    deadline = time.monotonic() + 60
    while not Path("joining").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # by now torch waits, outside of Python
    first.process.terminate()
    _, err = first.communicate(timeout=20)
    second.communicate()
    assert first.returncode == 143
    assert "process 0 of 2 stops: it was told to" in err


def test_evaluate_by_two_processes_equals_one(folder):
    line = "m --data data --pairs eng_Latn-fra_Latn,fra_Latn-eng_Latn --hypotheses h"
    quick = "--max-new-tokens 8 --batch-tokens 16"
    first, second = ended(start("evaluate", line, quick, "-o two.json"))
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert "Written to two.json." in first[2]
    assert second[1:] == ("", "")
    done(evaluate, line, quick, "-o one.json --force")
    assert content("one.json") == content("two.json")


def test_a_process_that_dies_ends_the_others_with_a_line(folder):
    code = (
        "import os, sys\n"
        "from prunecli.commands.app import main\n"
        "import prunecli.evaluation.decoding as decoding\n"
        "if os.environ['RANK'] == '1':\n"
        "    decoding.generate = lambda *_, **__: os._exit(9)\n"
        "line = 'evaluate m --data data --pairs eng_Latn-fra_Latn --max-new-tokens 8 --batch-tokens 16'\n"
        "main(line.split())\n"
    )
    first, second = ended(start(code=code))
    assert second[0] == 9, second[2]
    assert first[0] == 1, first[2]
    assert "process 0 of 2 stops: another one has ended" in first[2]
    assert "Traceback" not in first[2]
    assert not Path("evaluation.json").exists()


def test_processes_that_cannot_join(folder):
    code = "import os; from prunecli.commands.app import main; del os.environ['MASTER_ADDR']; main()"
    first, second = start("evaluate m --data data", code=code)
    second.process.kill()
    ((status, _, err),) = ended([first])
    assert status == 1
    assert "the 2 processes cannot join" in err
