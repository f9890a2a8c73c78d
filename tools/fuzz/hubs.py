"""Damage to what a hub answers: descriptions, names of commits and contents, sizes, bodies, ranges."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.fuzz.hostile import HOSTILE
from tests.fuzz.mutations import damage_json
from tests.hub_server import MAIN_COMMIT, Fault, HubServer

HEADERS = ("ETag", "X-Linked-Etag", "X-Linked-Size", "X-Repo-Commit", "Content-Range", "Content-Encoding")


def damage_hub(hub: HubServer, rng: Random) -> list[str]:
    """One kind of damage to its answers, or none; returns what was done."""
    files = next(iter(hub.models.values()))[MAIN_COMMIT]
    name = rng.choice(sorted(files))
    kind = rng.randrange(6)
    if kind == 0:
        siblings = [
            {"rfilename": file, "size": len(data), "blobId": "a" * 40} for file, data in files.items()
        ]
        said: dict[str, Any] = {"id": "org/tiny", "sha": MAIN_COMMIT, "siblings": siblings}
        hub.description = damage_json(json.dumps(said).encode(), rng)
    elif kind == 1:
        value = rng.choice((*HOSTILE, "../../out", '"/tmp/out"', 0, -1, 1 << 40))
        text = str(value).encode("latin-1", "replace").decode("latin-1")[:2000]
        hub.headers[name] = {rng.choice(HEADERS): "".join(c for c in text if c.isprintable())}
    elif kind == 2:
        hub.announced[name] = rng.choice((0, 1, len(files[name]) - 1, len(files[name]) + 1, 1 << 40))
    elif kind == 3:
        hub.cuts[name] = [rng.randrange(len(files[name]) + 1) for _ in range(rng.choice((1, 3, 30)))]
    elif kind == 4:
        hub.faults = [
            rng.choice(
                (
                    None,
                    Fault(status=rng.choice((200, 204, 302, 403, 416, 429, 500, 503))),
                    Fault(cut=rng.randrange(100)),
                    Fault(is_whole=True),
                    Fault(is_circle=True),
                    Fault(shift=rng.choice((-1, 1, 8))),
                )
            )
            for _ in range(rng.choice((1, 3, 100)))
        ]
    else:
        hub.longest = rng.choice((None, 1_000, 10_000))
    return [f"hub: {kind} {name}"]
