"""What training begins with: a checkpoint, or random weights of a config that are kept in the run's state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunecli.architectures import FAMILIES
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.declared import class_names
from prunecli.text.tasks import TrainingTask, task_of_class, training_task_of


@dataclass(frozen=True)
class Start:
    """What training begins with.

    Attributes:
        checkpoint: its directory; None: random weights.
        config: of random weights: a config.json of a known family, or a directory with one.
        tokenizer: directory of the tokenizer of random weights; None: that beside `config`.
        seed: of random weights.
    """

    checkpoint: Path | None
    config: Path | None = None
    tokenizer: Path | None = None
    seed: int = 0

    @property
    def path(self) -> Path:
        """The file or directory that was named."""
        path = self.checkpoint or self.config
        assert path is not None
        return path

    def identity(self) -> dict[str, Any]:
        """What it is, as JSON.

        Raises:
            PruneError: what cannot be trained.
        """
        if self.config is not None:
            from prunecli.training.scratch import describe

            return describe(self.config, self.tokenizer)
        with open_model(self.path) as checkpoint:
            checkpoint.require_architecture()
            config = json.dumps(checkpoint.config, sort_keys=True).encode()
            return {
                "source": checkpoint.fingerprint,
                "bytes": checkpoint.total_bytes,
                "config": hashlib.sha256(config).hexdigest(),
            }

    def files(self, identity: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Key of `identity` -> the file or directory that it is of -> its value, for messages."""
        start = str(self.path)
        paths = dict.fromkeys(("source", "bytes"), start) | {
            "config": str(Path(start) / "config.json") if Path(start).is_dir() else start,
            "vocabulary": str(self.tokenizer or start),
        }
        return {key: {paths[key]: str(value)} for key, value in identity.items() if value is not None}

    def open(self, state: Path) -> Checkpoint:
        """The checkpoint that training begins with; random weights lie in the directory `state`."""
        if self.config is None:
            return open_model(self.path)
        from prunecli.training.scratch import initial_checkpoint

        if not (state / "initial").is_dir():
            initial_checkpoint(self.config, self.tokenizer, state / "initial", self.seed)
        return open_model(state / "initial")

    def task(self) -> TrainingTask:
        """What the model is for."""
        if self.config is None:
            with open_model(self.path) as checkpoint:
                return training_task_of(checkpoint)
        from prunecli.training.scratch import read_config

        values = read_config(self.config)
        family = FAMILIES[str(values["model_type"])]
        name = next(iter(class_names(values)), family.model_class)
        return task_of_class(name, is_pair=len(family.stacks) > 1)
