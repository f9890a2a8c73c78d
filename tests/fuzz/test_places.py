"""Every place of a file is met, and nothing beside it is damaged."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
from safetensors.numpy import save_file

from tests.fuzz.cases import Case
from tests.fuzz.places import each_once, kinds_of_places

CASE = Case("results", ("a.json", "model"), ("*.json", "model/*"), ("inspect",))
VALUE = {"rows": [{"x1": 1, "y": [2]}, {"x2": 3}], "z": None}


def test_each_kind_of_place_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "a.json").write_text(json.dumps(VALUE))
    (tmp_path / "model" / "broken.json").write_text("{")
    tensors = {f"layers.{number}.weight": np.ones((2, 2), np.float32) for number in range(3)}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    kinds = kinds_of_places(tmp_path, tmp_path, [CASE])
    ways = [{"/".join(map(str, place.at)) for place in places} for places in kinds]
    assert ways[:7] == [
        {""},
        {"rows"},
        {"rows/0", "rows/1"},
        {"rows/0/x1", "rows/1/x2"},
        {"rows/0/y"},
        {"rows/0/y/0"},
        {"z"},
    ]
    assert {f"layers.{number}.weight/dtype" for number in range(3)} in ways
    assert {"layers.0.weight/shape/0", "layers.1.weight/shape/1"} < set().union(*ways)
    assert not (tmp_path / "places").exists()

    rng = Random(0)
    met = list(islice(each_once(kinds, rng), 3 * len(kinds)))
    assert len({id(places) for places in kinds for place in met[: len(kinds)] if place in places}) == len(
        kinds
    )
    whole = (tmp_path / "model" / "model.safetensors").read_bytes()
    for place in met:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        place.damage(CASE, tmp_path, rng)
        changed = [path for path, data in before.items() if path.read_bytes() != data]
        assert changed in ([], [tmp_path / place.file])  # what replaces a value may be equal to it
        if changed and changed[0].suffix == ".safetensors":
            assert changed[0].read_bytes().endswith(whole[-48:])
        for path, data in before.items():
            path.write_bytes(data)
