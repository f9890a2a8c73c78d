"""Processes of the command line, forked from one that has imported torch and transformers: they start at once."""

import multiprocessing
import os
import re
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch transformers.models.nllb_moe.modeling_nllb_moe transformers.models.m2m_100.modeling_m2m_100 "
    "prunecli.commands.app prunecli.modules.loading prunecli.training.finetune prunecli.text.tokens"
)


@dataclass
class Process:
    """A started process; what it prints goes to files of its own."""

    process: Any
    files: tuple[Path, Path]
    returncode: int | None = field(default=None, init=False)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end; stdout and stderr."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            raise TimeoutError(f"still running after {timeout} s: {self.files[1].read_text()}")
        self.returncode = self.process.exitcode
        out, err = (path.read_text() for path in self.files)
        return re.sub(r"^\[Gloo\] .*\n", "", out, flags=re.M), err  # which torch 2.10 prints


def start(*lines: str, code: str | None = None, processes: int = 2) -> list[Process]:
    """A prunecli command, or Python code with the words of these lines, in processes that know of each other.

    They run in the working directory.
    """
    folder = Path.cwd()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    common["CUDA_VISIBLE_DEVICES"] = ""  # a process takes a GPU of its own
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED.split())
    started = []
    for number in range(processes):
        environment = {**common, "RANK": str(number), "LOCAL_RANK": str(number)}
        outputs = Path(tempfile.mkdtemp(dir=folder.parent))
        files = (outputs / "out", outputs / "err")
        for file in files:  # there though it be killed at once
            file.touch()
        process = context.Process(target=_run, args=(folder, files, environment, lines, code))
        process.start()
        started.append(Process(process, files))
    return started


def ended(processes: list[Process]) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each; the status is -9 after SIGKILL."""
    found = []
    for process in processes:
        out, err = process.communicate()
        found.append((process.returncode, out, err))
    return found


def _run(folder: Path, files: tuple[Path, Path], environment: Any, lines: Any, code: str | None) -> None:
    for descriptor, path in zip((1, 2), files, strict=True):
        opened = os.open(path, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["prunecli", *" ".join(lines).split()]
    if code is not None:
        exec(code, {"__name__": "__main__"})
        return
    from prunecli.commands.app import main

    main()
