import json
import zlib
from base64 import b64encode

import numpy as np
from pydantic import TypeAdapter

from prunecli import results
from prunecli.model.decision import Decision, Origin, Ranked
from prunecli.results.decisions import FILE, Written, document

JSON = TypeAdapter(Written)


def test_many_units_are_rounded_and_the_choice_is_not():
    generator = np.random.default_rng(0)
    places = []
    for layer in range(9):
        values = np.exp(3 * generator.normal(size=8192))
        kept = np.argsort(-values)[:6000]
        places.append(Ranked.of((f"layers.{layer}.mlp", "decoder", layer), range(8192), kept, values))
    decision = Decision("unit", tuple(places), "norms")
    text = json.dumps(JSON.dump_python(decision, context=FILE), separators=(",", ":"))
    again = JSON.validate_python(json.loads(text))
    assert len(text) < 16 * 9 * 8192  # bytes a unit
    for old, new in zip(decision.places, again.places, strict=True):
        np.testing.assert_array_equal(new.kept, old.kept)
        large = np.asarray(old.values) > 1e-3 * np.max(np.asarray(old.values))
        np.testing.assert_allclose(np.asarray(new.values)[large], np.asarray(old.values)[large], rtol=1e-3)
        # Values that are equal once they are rounded do not mix what stays and what goes.
        ranks = np.asarray(new.ranks)
        assert set(ranks[new.kept]) == set(range(1, 6001))


def test_packed_lists_of_earlier_files_are_read():
    def packed(values, **more):
        raw = json.dumps(values).encode() if isinstance(values, list) else values.tobytes()
        return {"count": 3, "data": b64encode(zlib.compress(raw)).decode(), **more}

    payload = {
        "part": "unit",
        "metric": "norms",
        "places": [
            {
                "name": "layers.0.mlp.units",
                "side": "decoder",
                "layer": 0,
                "count": 3,
                "values": packed(np.array([1, 0.5, 0.25], "<f2"), dtype="float16", scale=4.0),
                "kept": packed(np.packbits([True, False, True]), dtype="bits"),
                "labels": packed(["a", "b", "c"]),
            }
        ],
    }
    (place,) = JSON.validate_python(payload).places
    assert place.values is not None
    assert place.values.tolist() == [4.0, 2.0, 1.0]
    assert place.kept.tolist() == [True, False, True]
    assert place.labels == ("a", "b", "c")


def test_the_file_is_a_table_of_components(tmp_path):
    place = Ranked.of(("layers.1.mlp", "decoder", 1), [0, 2, 5], [2], [0.5, 2.0, 1.5])
    origin = Origin((("gates.json", "12ab"),), ("code",))
    decision = Decision("expert", (place,), "reap", origin=origin, step=1, command="prune-experts")
    made = document({1: decision})
    (tmp_path / FILE).write_text(json.dumps(made.to_json()))
    frame = results.read(tmp_path / FILE).frame("decisions")
    assert frame["expert"].tolist() == [0, 2, 5]
    assert frame["rank"].tolist() == [3, 1, 2]
    assert frame["margin"].tolist() == [-1.5, 0.0, -0.5]
    assert frame["kept"].tolist() == [False, True, False]
    assert set(frame["cutoff"]) == {2.0}
    assert set(frame["step"]) == {1}
