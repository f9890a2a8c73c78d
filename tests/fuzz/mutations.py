"""Damage to files: bytes, text, JSON, safetensors headers and values, indexes of shards, recipes."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.hostile import HOSTILE, RAW_DAMAGE, RECIPES, TEXT_DAMAGE

TYPES = ("F16", "BF16", "I32", "F64", "F8_E4M3", "U8", "BOOL", "C64", "F4", "X", "", 5, None)
"""What a header may give for the type of a tensor."""


def damage_bytes(data: bytes, rng: Random) -> bytes:
    """Cut, lengthened, emptied, or with some bytes changed."""
    place, length = rng.randrange(len(data) + 1), rng.choice((1, 8, 100))
    before, after = data[:place], data[place:]
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 4, 32)) if data else 0):
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return rng.choice(
        (
            before,
            data + rng.randbytes(rng.choice((1, 8, 4096))),
            rng.choice((b"", bytes(len(data)))),
            before + rng.randbytes(length) + after[length:],
            before + after[rng.choice((1, 7, 512)) :],
            before + bytes(rng.choice((1, 64))) + after,
            bytes(flipped),
        )
    )


def damage_text(data: bytes, rng: Random) -> bytes:
    """Text as files of text are: other line ends, marks, empty and endless lines, bytes that are no UTF-8."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data) + 1)
        inserted = rng.choice((rng.choice(RAW_DAMAGE), *(rng.choice(TEXT_DAMAGE).encode() for _ in range(2))))
        lines = data.split(b"\n")
        lines[rng.randrange(len(lines))] = rng.choice((b"", b" ", b"\t", b"\r"))
        data = rng.choice(
            (
                *(data[:place] + inserted + data[place:] for _ in range(3)),
                data.replace(b"\n", b"\r\n", rng.choice((1, 5, -1))),
                b"\xef\xbb\xbf" + data,
                b"\n".join(lines),
                rng.choice((data.rstrip(b"\n"), data + b"\n\n", b"", b"\n" * 5, data.replace(b"\n", b"\r"))),
                damage_bytes(data, rng),
            )
        )
    return data


def damage_json(data: bytes, rng: Random) -> bytes:
    """Values replaced, removed, added, moved or repeated; seldom the text itself."""
    if rng.random() < 0.1:
        return damage_text(data, rng)
    try:
        value = json.loads(data)
    except ValueError:
        return damage_bytes(data, rng)
    if rng.random() < 0.03:
        return b"[" * 100_000 if rng.random() < 0.5 else b'{"a":' * 5000 + b"1" + b"}" * 5000
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = damage_value(value, rng)
    text = json.dumps(value)
    if rng.random() < 0.05 and isinstance(value, dict) and value:
        key = rng.choice(list(value))
        text = text[:-1] + f", {json.dumps(key)}: {json.dumps(rng.choice(HOSTILE))}}}"
    return text.encode()


def damage_value(value: Any, rng: Random) -> Any:
    """A copy of a JSON value with one change in a random place; each level is as likely as the others."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.12:
        return replaced(value, rng)
    if isinstance(value, dict):
        made, key = dict(value), rng.choice(list(value))
        draw = rng.random()
        if draw < 0.08:
            del made[key]
        elif draw < 0.13:
            made[str(rng.choice(HOSTILE))[:200]] = made.pop(key)
        elif draw < 0.17:
            made[str(rng.choice(HOSTILE))[:200]] = rng.choice(HOSTILE)
        elif draw < 0.21:
            made[key] = value[rng.choice(list(value))]
        else:
            made[key] = damage_value(value[key], rng)
        return made
    listed, place = list(value), rng.randrange(len(value))
    draw = rng.random()
    if draw < 0.1:
        del listed[place]
    elif draw < 0.2:
        listed.insert(place, rng.choice((*HOSTILE, listed[place])))
    elif draw < 0.25:
        rng.shuffle(listed)
    else:
        listed[place] = damage_value(listed[place], rng)
    return listed


def replaced(value: Any, rng: Random) -> Any:
    """Something else in its place: of a number often one near it, or of another kind."""
    if isinstance(value, (int, float)) and rng.random() < 0.4:
        return rng.choice(
            (value + 1, value - 1, -value, value * 2, str(value), float(value), [value], value * 1000)
        )
    if isinstance(value, list) and rng.random() < 0.4:  # a shape, for one, of as many values
        return rng.choice(([*value, 1], [1, *value], value[::-1], value[:1], value * 2))
    return rng.choice(HOSTILE)


def damage_safetensors(data: bytes, rng: Random) -> bytes:
    """The header's length, its entries, or the values: NaN, infinity, any bytes."""
    if rng.random() < 0.15 or len(data) < 10:
        return damage_bytes(data, rng)
    (length,) = struct.unpack("<Q", data[:8])
    if rng.random() < 0.1:
        absurd = rng.choice((0, 1, length - 1, length + 1, len(data), 1 << 31, 1 << 62, (1 << 64) - 1))
        return struct.pack("<Q", absurd) + data[8:]
    if length > len(data) - 8:
        return damage_bytes(data, rng)
    text, values = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.25:
        place = rng.randrange(len(values) // 4) * 4
        bad = rng.choice((np.nan, np.inf, -np.inf, 3e38, -3e38))
        count = rng.choice((1, 1, 16, 4096))
        filled = np.full(count, bad, "<f4").tobytes()[: len(values) - place]
        return data[: 8 + length] + values[:place] + filled + values[place + 4 * count :]
    text = _damage_header(text, rng)
    return struct.pack("<Q", len(text)) + text + values


def _damage_header(text: bytes, rng: Random) -> bytes:
    try:
        entries = json.loads(text)
        names = [name for name in entries if name != "__metadata__"]
        one, other = entries[rng.choice(names)], entries[rng.choice(names)]
        kind = rng.randrange(6)
        if kind == 0:
            one["data_offsets"] = other["data_offsets"]
        elif kind == 1:
            one["data_offsets"] = [
                number + rng.choice((-4, -1, 1, 4, 1 << 40, -(1 << 40))) for number in one["data_offsets"]
            ]
        elif kind == 2:
            shape = one["shape"]
            absurd = ([0], [1 << 40, 1 << 40], [])
            one["shape"] = rng.choice((other["shape"], shape[::-1], [*shape, 1], [1, *shape], *absurd))
        elif kind == 3:
            one["dtype"] = rng.choice(TYPES)
        elif kind == 4:
            entries[rng.choice(names)] = one
        else:
            return damage_json(text, rng)
        return json.dumps(entries).encode()
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return damage_bytes(text, rng)


def damage_index(data: bytes, rng: Random) -> bytes:
    """Shards that are elsewhere, each other, the index itself, or nothing."""
    paths = (
        *("../../etc/passwd", "/etc/passwd", "..", ".", "", "../in/model.safetensors"),
        *("/dev/zero", "/dev/zero.bin", "model.safetensors.index.json", "config.json"),
        *("a\0b.safetensors", "x" * 5000 + ".bin", "..\\x.bin", "dir.safetensors", "CON.bin"),
        *("./model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors/"),
    )
    try:
        value = json.loads(data)
        weight_map = value["weight_map"]
        for _ in range(rng.choice((1, 1, 5))):
            name = rng.choice(list(weight_map))
            draw = rng.random()
            if draw < 0.5:
                weight_map[name] = rng.choice(paths)
            elif draw < 0.7:
                weight_map[name] = weight_map[rng.choice(list(weight_map))]
            elif draw < 0.85:
                weight_map[rng.choice(paths)] = weight_map.pop(name)
            else:
                return damage_json(data, rng)
        return json.dumps(value).encode()
    except (ValueError, KeyError, TypeError, IndexError):
        return damage_bytes(data, rng)


def damage_recipe(data: bytes, rng: Random) -> bytes:
    """One of `RECIPES`, or a good one in which words are exchanged."""
    if rng.random() < 0.35:
        return rng.choice(RECIPES).encode()
    if rng.random() < 0.2:
        return damage_text(data, rng)
    words = data.decode().split(" ")
    for _ in range(rng.choice((1, 1, 2, 4))):
        draw, place = rng.random(), rng.randrange(len(words))
        if draw < 0.5:
            words[place] = rng.choice(words)
        elif draw < 0.6:
            del words[place]
        else:
            hostile = str(rng.choice(HOSTILE)).encode("utf-8", "replace").decode()
            signs = ("${", "}", "*a", "&a", "!!x", "|", "'", "${gates}")
            words[place] = rng.choice((json.dumps(hostile[:3000]), hostile[:200], *signs))
            words[place] += rng.choice(("", "\n", ","))
    return " ".join(words).encode("utf-8", "surrogatepass")


def damage_for(path: Path) -> Callable[[bytes, Random], bytes]:
    """The damage that fits the kind of file."""
    if path.name.endswith(".index.json"):
        return damage_index
    return {
        **dict.fromkeys((".json", ".partial"), damage_json),
        **dict.fromkeys((".bin", ".model", ".pt", ".pth"), damage_bytes),
        ".safetensors": damage_safetensors,
        ".yaml": damage_recipe,
    }.get(path.suffix, damage_text)


def damage_file(path: Path, rng: Random) -> str:
    """Damage a file in its place; returns what was done, in a word or two."""
    draw = rng.random()
    if draw < 0.02:
        path.unlink()
        return "removed"
    if draw < 0.03:
        path.unlink()
        path.mkdir()
        return "a directory"
    if draw < 0.04:
        path.unlink()
        path.symlink_to(rng.choice((path, Path("/etc/passwd"), Path("nowhere"), Path(".."))))
        return "a link"
    function = damage_for(path)
    path.write_bytes(function(path.read_bytes(), rng))
    return function.__name__.removeprefix("damage_")
