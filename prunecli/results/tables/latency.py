"""latency.json: speed by batch size and beam, and size and memory of each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prunecli.results.tables.rows import Tables, picked, spread

UNITS = {
    "load_s": "load_seconds",
    "resident_peak": "resident_peak_bytes",
    "device_peak": "device_peak_bytes",
}
"""Key of the file -> column."""


def tables(payload: Mapping[str, Any]) -> Tables:
    """`speed`, in the terminal's order, and `size`."""
    results = payload["results"]
    speed = [
        {
            **picked(result, ("checkpoint",)),
            **picked(result["timings"][index], ("batch_size", "beam")),
            **spread("tokens_per_second", result["timings"][index]["tokens_per_second"]),
            **spread("seconds_per_sentence", result["timings"][index]["seconds_per_sentence"]),
            **spread("speedup", result["timings"][index]["speedup"]),
        }
        for index in range(len(results[0]["timings"]))
        for result in results
    ]
    size = [
        {
            **picked(result, ("checkpoint", "dtype", "parameters", "checkpoint_bytes")),
            **{column: result[key] for key, column in UNITS.items() if key in result},
        }
        for result in results
    ]
    return {"speed": speed, "size": size}
