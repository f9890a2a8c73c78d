"""Times of passes over the examples of a task, checkpoints in turns: a machine's drift hits all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from prunecli.evaluation.hardware import device_names, fit_together, model_sizes
from prunecli.evaluation.options import LatencyOptions
from prunecli.evaluation.workload import Phase, Workload
from prunecli.model.checkpoint import Checkpoint
from prunecli.progress import Progress

Setting = tuple[int, int]
"""(batch size, beam)."""
Seconds = Mapping[tuple[Setting, Phase], Mapping[str, Sequence[float]]]
"""What was timed -> checkpoint's label -> the time of each run."""


class Turns:
    """Runs of the checkpoints in turns; holds all models where memory allows, else the one at hand.

    Attributes:
        together: whether it holds all, so that their runs alternate; else each checkpoint has all of its runs in a row.
        sizes: label -> of its model, once it was loaded.
        devices: label -> what its model runs on, once it was loaded.

    Args:
        rooms: label -> bytes that a run holds beside the weights.
    """

    def __init__(
        self,
        opened: Mapping[str, Checkpoint],
        workloads: Mapping[str, Workload],
        rooms: Mapping[str, int],
        options: LatencyOptions,
    ) -> None:
        from prunecli.modules.devices import choose_devices
        from prunecli.modules.fitting import COMPUTE

        self._opened, self._workloads, self._rooms, self._options = opened, workloads, rooms, options
        self._models: dict[str, Any] = {}
        self.sizes: dict[str, dict[str, int]] = {}
        self.devices: dict[str, list[str]] = {}
        devices = choose_devices(options.device)
        self.together = fit_together(list(opened.values()), devices.first, COMPUTE[options.dtype])
        self._side_by_side = self.together and len(opened) > 1
        self._devices = devices.alone if self._side_by_side else devices

    @property
    def labels(self) -> list[str]:
        """Of the checkpoints."""
        return list(self._opened)

    def seconds(self, label: str, batch_size: int, beam: int) -> dict[Phase, float]:
        """Time of each phase of one pass over the examples."""
        model, work = self.model(label), self._workloads[label]
        total: dict[Phase, float] = {}
        for start in range(0, len(work), batch_size):
            for phase, elapsed in work.part(start, start + batch_size).run(model, beam).items():
                total[phase] = total.get(phase, 0.0) + elapsed
        return total

    def model(self, label: str) -> Any:
        """Loaded where it is not yet."""
        if label not in self._models:
            from prunecli.modules.loading import load_for_decoding, load_model

            if not self.together:
                self._models.clear()
                gc.collect()
            load = load_for_decoding if self._workloads[label].decodes else load_model
            room = 0 if self._side_by_side else self._rooms[label]
            path = self._opened[label].path
            model = load(path, device=self._devices, dtype=self._options.dtype, room=room)
            self._models[label] = model
            self.sizes[label] = model_sizes(model)
            self.devices[label] = device_names(model)
        return self._models[label]


def measure_seconds(turns: Turns, options: LatencyOptions, progress: Progress) -> Seconds:
    """Time every setting of every checkpoint, as often as `options` say."""
    settings = list(product(options.batch_sizes, options.beams or ()))
    passes, labels = range(options.warm_up + options.runs), turns.labels
    order = list(product(settings, passes, labels))
    if not turns.together:
        order.sort(key=lambda turn: labels.index(turn[2]))  # stable: each checkpoint has its runs in a row
    seconds: dict[tuple[Setting, Phase], dict[str, list[float]]] = {}
    with progress("timing", len(order), "runs") as advance:
        for setting, number, label in order:
            phases = turns.seconds(label, *setting)
            if number >= options.warm_up:
                for phase, elapsed in phases.items():
                    seconds.setdefault((setting, phase), {}).setdefault(label, []).append(elapsed)
            advance(1)
    return seconds
