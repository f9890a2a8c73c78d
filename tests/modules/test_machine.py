import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from prunecli.modules import machine
from prunecli.modules.machine import available_memory, container_room, control_groups
from tests.forked import ended, start


def group(path: Path, limit: str) -> Path:
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text("700\n")
    (path / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 50\n")
    return path


@pytest.mark.parametrize(("limit", "room"), [("1000", 500), ("400", 0), ("max", None), ("", None)])
def test_a_container_s_limit(limit, room, tmp_path):
    assert container_room(group(tmp_path, limit)) == room


def test_groups_around_a_group_limit_it_too(tmp_path):
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,memory:/job/7\n0::/user/shell\n")
    assert [str(folder.relative_to(tmp_path)) for folder in control_groups(own, tmp_path)] == [
        *("memory/job/7", "memory/job", "memory"),
        *("user/shell", "user", "."),
    ]
    assert control_groups(tmp_path / "none", tmp_path) == [tmp_path]


def test_the_smallest_bound_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "control_groups", lambda: [tmp_path, group(tmp_path, "1000")])
    assert available_memory() == 500
    monkeypatch.setattr(machine, "process_room", lambda: 30)
    assert available_memory() == 30


def test_a_limit_of_the_process():
    code = (
        "import resource; from prunecli.modules.machine import available_memory; "
        "import psutil; used = psutil.Process().memory_info().vms; "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY)); "
        "print(available_memory())"
    )
    ((status, out, err),) = ended(start(code=code, processes=1))
    assert status == 0, err
    assert int(out) <= 64 << 20


FREED = """
import resource
import torch
from prunecli.modules import machine

machine.available_memory = lambda: 12 << 30
machine.keep_freed_blocks(1 << 30)
for _ in range(24):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
full = machine.resident_now()
machine.give_back()
print(full - machine.resident_now())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_blocks_are_had_again_without_being_cleared():
    """In a process of its own: holes that other tests left in the heap may be a few bytes too small."""
    run = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    *faults, given_back = map(int, run.stdout.split())
    assert max(faults[16:]) < 0.1 * (64 << 20) / resource.getpagesize()  # the first ones leave such holes too
    assert given_back > 60 << 20
