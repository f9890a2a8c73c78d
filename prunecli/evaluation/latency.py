"""Speed of several checkpoints, run in turns: a machine's drift affects all of them alike.

Every checkpoint decodes the same sentences to the same number of tokens (the end token is suppressed), so that a model
that stops early does not look fast. 5 runs, batch 1 and beam 5 are from 2309.01826, section 3; examples per second of a
model that does not generate are Table 4 of 1905.10650.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch

from prunecli.evaluation.hardware import (
    device_name,
    fit_together,
    idle_threads,
    measure_cost,
    model_sizes,
    threads,
)
from prunecli.evaluation.options import LatencyOptions
from prunecli.evaluation.workloads import Phase, Workload, workload
from prunecli.model.checkpoint import Checkpoint, directory_of, open_model
from prunecli.model.cost import Load
from prunecli.model.history import pruned_pairs
from prunecli.modules.devices import choose_devices, devices_of
from prunecli.modules.fitting import COMPUTE, decoding, decoding_room, dtype_name, fitting_dtype
from prunecli.modules.loading import load_for_decoding, load_model
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.document import Json, header
from prunecli.results.latency import Latency, Spread, Timing
from prunecli.text.choice import TextChoice, described
from prunecli.text.parallel import pair_name
from prunecli.text.tasks import TaskName, task_of, task_of_all

BEAM = 5
"""Default beam of translation."""


Setting = tuple[int, int]
"""(batch size, beam)."""


def bench_latency(
    checkpoints: Mapping[str, Checkpoint | Path | str],
    choice: TextChoice,
    options: LatencyOptions | None = None,
    progress: Progress = silent,
    say: Say = unsaid,
    *,
    task: TaskName | None = None,
) -> Latency:
    """Measure the speed of each checkpoint at `task`, on the first texts that `choice` names.

    Translation takes sentences of the first pair of `choice` that all checkpoints were pruned for.

    Args:
        checkpoints: label -> an open model, a directory or a name on the hub, the baseline first.
        say: called with each automatic choice and its reason.
        task: None: the task of the models if plain or labelled text is chosen, else translation.

    Returns:
        latency.json; nothing is written.

    Raises:
        PruneError: a checkpoint, text or language that cannot be used.
    """
    options = options or LatencyOptions()
    directories = {label: directory_of(model, say) for label, model in checkpoints.items()}
    if task is None:
        named = choice.files or choice.labelled is not None
        task = task_of_all(list(directories.values()), task_of) if named else "translation"
    choice.check_task(task, {"beam": options.beams is not None})
    data = choice.read(task, say)
    if task == "translation":
        data = replace(data, pairs=pruned_pairs(list(directories.values()), data.pairs) or data.pairs)
    if options.beams is None:
        beams = (BEAM,) if task == "translation" else (1,)
        options = options.model_copy(update={"beams": beams})
    opened = {label: open_model(path) for label, path in directories.items()}
    with threads(options.threads or idle_threads(opened.values(), say)):
        work = {
            label: workload(checkpoint, data, options.count, options.new_tokens)
            for label, checkpoint in opened.items()
        }
        gc.collect()
        beam, largest = max(options.beams or (1,)), max(options.batch_sizes)
        longest = max(one.longest for one in work.values())
        load = Load(largest, beam, max(longest, options.new_tokens))
        # One type for all models: speeds in two types cannot be compared.
        dtype = fitting_dtype(
            opened,
            choose_devices(options.device),
            options.dtype,
            beside=decoding(load),
            only_runs=True,
            say=say,
        )
        options = options.model_copy(update={"dtype": dtype_name(dtype)})
        rooms = {
            label: decoding_room(checkpoint, load, COMPUTE[options.dtype])
            for label, checkpoint in opened.items()
        }
        costs: dict[str, Json] = {label: {} for label in opened}
        if options.memory:
            with progress("loading each by itself", len(opened), "checkpoints") as advance:
                for label, checkpoint in opened.items():
                    costs[label] = measure_cost(
                        checkpoint=str(checkpoint.path),
                        device=options.device,
                        dtype=options.dtype,
                        threads=torch.get_num_threads(),
                        work=work[label].part(0, largest),
                        beam=beam,
                        room=rooms[label],
                    )
                    advance(1)
        turns = Turns(opened, work, rooms, options)
        seconds = turns.timed(progress)
        first = next(iter(opened))
        results = [
            {
                "checkpoint": label,
                "dtype": options.dtype,
                **turns.sizes[label],
                "checkpoint_bytes": checkpoint.total_bytes,
                "devices": turns.devices[label] if len(turns.devices[label]) > 1 else None,
                **costs[label],
                "timings": [
                    _timing(setting, phase, by_label[label], by_label[first], work[label])
                    for (setting, phase), by_label in seconds.items()
                ],
            }
            for label, checkpoint in opened.items()
        ]
        if data.task == "translation":
            about: Json = {"pair": pair_name(*data.pairs[0])}
        else:
            about = {"task": data.task, "data": described(data.text)}
        if data.context is not None:
            about["context"] = data.context
        if data.task in ("translation", "lm"):
            about["new_tokens"] = options.new_tokens
        return Latency.model_validate(
            {
                **header(Latency.FORMAT, list(opened.values()), None),
                **about,
                "sentences": len(work[first]),
                "runs": options.runs,
                "warm_up": options.warm_up,
                "device": ", ".join(dict.fromkeys(chain(*turns.devices.values()))),
                "dtype": options.dtype,
                "threads": torch.get_num_threads(),
                "torch": str(torch.__version__),
                "interleaved": turns.together,
                "results": results,
            }
        )


@dataclass
class Turns:
    """Runs the checkpoints in turns; holds all models if they fit in memory, else one at a time.

    Attributes:
        rooms: label -> bytes that a run holds besides the weights.
        together: whether all models are held, so that their runs alternate.
        sizes: label -> parameters and bytes of its model, once it was loaded.
        devices: label -> names of the devices of its model, once it was loaded.
    """

    opened: Mapping[str, Checkpoint]
    workloads: Mapping[str, Workload]
    rooms: Mapping[str, int]
    options: LatencyOptions

    def __post_init__(self) -> None:
        self._models: dict[str, Any] = {}
        self.sizes: dict[str, dict[str, int]] = {}
        self.devices: dict[str, list[str]] = {}
        devices = choose_devices(self.options.device)
        self.together = fit_together([*self.opened.values()], devices.first, COMPUTE[self.options.dtype])
        self._side_by_side = self.together and len(self.opened) > 1
        self._devices = devices.alone if self._side_by_side else devices

    def timed(self, progress: Progress) -> dict[tuple[Setting, Phase], dict[str, list[float]]]:
        """Setting and phase -> label -> seconds of each timed run."""
        options, labels = self.options, list(self.opened)
        passes = range(options.warm_up + options.runs)
        order = list(product(product(options.batch_sizes, options.beams or ()), passes, labels))
        if not self.together:
            order.sort(
                key=lambda turn: labels.index(turn[2])
            )  # stable: each checkpoint has its runs in a row
        seconds: dict[tuple[Setting, Phase], dict[str, list[float]]] = {}
        with progress("timing", len(order), "runs") as advance:
            for setting, number, label in order:
                phases = self.seconds(label, *setting)
                if number >= options.warm_up:
                    for phase, elapsed in phases.items():
                        seconds.setdefault((setting, phase), {}).setdefault(label, []).append(elapsed)
                advance(1)
        return seconds

    def seconds(self, label: str, batch_size: int, beam: int) -> dict[Phase, float]:
        """Time of each phase of one pass over the examples."""
        model, work = self.model(label), self.workloads[label]
        total: dict[Phase, float] = {}
        for start in range(0, len(work), batch_size):
            for phase, elapsed in work.part(start, start + batch_size).run(model, beam).items():
                total[phase] = total.get(phase, 0.0) + elapsed
        return total

    def model(self, label: str) -> Any:
        """The model of a checkpoint, loaded at its first turn."""
        if label not in self._models:
            if not self.together:
                self._models.clear()
                gc.collect()
            load = load_for_decoding if self.workloads[label].decodes else load_model
            room = 0 if self._side_by_side else self.rooms[label]
            model = load(self.opened[label].path, device=self._devices, dtype=self.options.dtype, room=room)
            self._models[label] = model
            self.sizes[label] = model_sizes(model)
            self.devices[label] = [device_name(device) for device in devices_of(model)]
        return self._models[label]


def _timing(
    setting: Setting, phase: Phase, seconds: Sequence[float], baseline: Sequence[float], work: Workload
) -> Timing:

    count, tokens = len(work), work.tokens[phase]
    fields: Json = {}
    if phase is not None:
        fields["phase"] = phase
    elif work.decodes:
        fields["beam"] = setting[1]
    else:
        fields["examples_per_second"] = Spread.of([count / value for value in seconds])
    return Timing(
        batch_size=setting[0],
        **fields,
        seconds=[round(value, 6) for value in seconds],
        tokens_per_second=Spread.of([tokens / value for value in seconds]),
        seconds_per_sentence=Spread.of([value / count for value in seconds]),
        # Run i against run i of the baseline: slow phases of the machine cancel out, except in the runs in which they
        # begin and end, where one ratio may be any number; hence the median.
        speedup=Spread.of([base / value for base, value in zip(baseline, seconds, strict=True)]),
    )
