"""Pickled weight files: read in place where possible, and never run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import open_model
from tests.tiny import tiny_nllb_moe, write_json


class TestPickled:
    def save(self, directory: Path, payload: Any, **options: Any) -> Path:
        import torch

        directory.mkdir()
        torch.save(payload, directory / "pytorch_model.bin", **options)
        write_json(directory / "config.json", {"model_type": "some"})
        return directory

    @pytest.mark.parametrize(
        "options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"]
    )
    def test_views_shared_storages_and_strides(self, tmp_path: Path, options: dict[str, Any]) -> None:
        import torch

        base = torch.arange(24.0).reshape(4, 6)
        tensors = {
            "base": base,
            "alias": base,
            "rows": base[1:3],
            "transposed": base.t(),
            "columns": base[:, ::2],
            "expanded": torch.ones(1, 3).expand(4, 3),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 4),
            "half": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
            "flags": torch.tensor([True, False]),
        }
        with open_model(self.save(tmp_path / "model", tensors, **options)) as checkpoint:
            assert list(checkpoint.tensors) == list(tensors)
            for name, tensor in tensors.items():
                values = checkpoint.read(name)
                assert values.shape == tuple(tensor.shape)
                assert np.array_equal(values.astype(np.float64), tensor.detach().double().numpy())

    def test_a_torch_that_tells_no_offsets_without_values(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        load = torch.load

        def older(path: Path, **options: Any) -> Any:
            loaded = load(path, **options)
            if options.get("map_location") == "meta":
                return {name: torch.empty_like(tensor) for name, tensor in loaded.items()}
            return loaded

        monkeypatch.setattr(torch, "load", older)
        payload = {"a": torch.arange(6.0), "b": torch.arange(8.0).reshape(2, 4)[1:]}
        with open_model(self.save(tmp_path / "model", payload)) as checkpoint:
            assert len({checkpoint.location(name)[0] for name in payload}) == 1
            assert checkpoint.read("a").tolist() == [0, 1, 2, 3, 4, 5]
            assert checkpoint.read("b").tolist() == [[4, 5, 6, 7]]

    def test_contiguous_tensors_are_read_in_place(self, tmp_path: Path) -> None:
        import torch

        payload = {"a": torch.ones(3), "b": torch.ones(2, 3).t()}
        with open_model(self.save(tmp_path / "model", payload)) as checkpoint:
            assert len({checkpoint.location(name)[0] for name in payload}) == 2  # the file and its spool
            path = f"/proc/self/fd/{checkpoint.location('a')[0]}"
            if Path(path).exists():
                assert Path(path).resolve().name == "pytorch_model.bin"

    def test_a_file_that_would_run_code_is_refused(self, tmp_path: Path) -> None:
        import torch

        directory = self.save(tmp_path / "model", {"layer": torch.nn.Linear(1, 1)})
        with pytest.raises(CheckpointError, match="not a plain file of tensors"):
            open_model(directory)

    @pytest.mark.parametrize("payload", [[1, 2], {"step": 3}, {}], ids=str)
    def test_other_payloads_are_refused(self, tmp_path: Path, payload: Any) -> None:
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            open_model(self.save(tmp_path / "model", payload))

    def test_damaged_bytes_are_refused_or_read_as_other_values(self, tmp_path: Path) -> None:
        directory = tiny_nllb_moe(tmp_path / "model", pickled=True, experts=2, layers=1)
        path, generator = directory / "pytorch_model.bin", np.random.default_rng(0)
        data = path.read_bytes()
        for _ in range(50):
            damaged = bytearray(data)
            for position in generator.integers(0, 6000, 4):
                damaged[position] = generator.integers(256)
            path.write_bytes(damaged)
            with contextlib.suppress(CheckpointError), open_model(directory) as checkpoint:
                checkpoint.read("model.shared.weight")

    @pytest.mark.parametrize("kept", [0, 3, 40, 1000, -30])
    def test_a_truncated_file_is_refused(self, tmp_path: Path, kept: int) -> None:
        directory = tiny_nllb_moe(tmp_path / "model", pickled=True)
        path = directory / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            open_model(directory)

    def test_a_truncated_legacy_file_is_refused(self, tmp_path: Path) -> None:
        import torch

        directory = self.save(
            tmp_path / "model", {"a": torch.ones(500)}, _use_new_zipfile_serialization=False
        )
        path = directory / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            open_model(directory)
