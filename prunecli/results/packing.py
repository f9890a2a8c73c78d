"""Lists too long for JSON: numbers, marks and texts by zlib and base64, read with bounds whatever a file says."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from prunecli.results.document import Number, Record
from prunecli.tensors.json_files import parsed

MOST_COMPONENTS = 1 << 25
"""In a file; no model has more, and those of a hostile file would fill the memory."""
LARGEST_BYTES = 128 << 20
"""Of a file, and of what is unpacked at once."""
Type = Literal["float16", "int32", "uint8", "bits"]
DTYPES: Mapping[Type, str] = {"float16": "<f2", "int32": "<i4", "uint8": "|u1", "bits": "|u1"}


class Packed(Record):
    """Numbers, little-endian, of `dtype` (bits: eight in a byte, the first one highest), by zlib and base64.

    Attributes:
        scale: what they are to be multiplied by.
    """

    dtype: Type
    count: Annotated[int, Field(ge=0, le=MOST_COMPONENTS)]
    scale: Number = 1.0
    data: str

    @classmethod
    def of(cls, values: NDArray[Any]) -> Packed:
        """Of booleans, of whole numbers, or of others, which are rounded."""
        more, numbers = {}, values
        dtype: Type = "int32"
        if values.dtype == np.bool_:
            dtype, numbers = "bits", np.packbits(values)
        elif values.dtype == np.uint8:
            dtype = "uint8"
        else:
            is_finite = np.isfinite(values)
            largest = float(np.abs(values[is_finite]).max(initial=0.0))
            if not is_finite.all() or (values != np.rint(values)).any() or largest >= 1 << 31:
                more = {"scale": largest or 1.0}
                dtype, numbers = "float16", np.where(is_finite, values, np.nan) / more["scale"]
        data = _deflated(numbers.astype(DTYPES[dtype]).tobytes())
        return cls(dtype=dtype, count=len(values), data=data, **more)

    def array(self) -> NDArray[Any]:
        """The numbers.

        Raises:
            ValueError: other than so many of them.
        """
        dtype = np.dtype(DTYPES[self.dtype])
        size = -(-self.count // 8) if self.dtype == "bits" else self.count * dtype.itemsize
        values = np.frombuffer(_inflated(self.data, size, size), dtype)
        if self.dtype == "bits":
            return np.unpackbits(values, count=self.count).astype(np.bool_)
        return values.astype(np.float64) * self.scale if self.dtype == "float16" else values


class PackedText(Record):
    """Texts: a JSON list of them, by zlib and base64."""

    count: Annotated[int, Field(ge=0, le=MOST_COMPONENTS)]
    data: str

    @classmethod
    def of(cls, texts: Sequence[str]) -> PackedText:
        """Of these."""
        return cls(count=len(texts), data=_deflated(json.dumps(list(texts)).encode()))

    def texts(self) -> tuple[str, ...]:
        """The texts.

        Raises:
            ValueError: other than so many of them.
        """
        found = parsed(_inflated(self.data, 0, min(1024 * self.count + 2, LARGEST_BYTES)))
        if (
            not isinstance(found, list)
            or len(found) != self.count
            or not all(isinstance(t, str) for t in found)
        ):
            raise ValueError(f"other than {self.count} texts")
        return tuple(found)


def _deflated(content: bytes) -> str:
    return b64encode(zlib.compress(content, 6)).decode("ascii")


def _inflated(text: str, least: int, most: int) -> bytes:
    """At most so many bytes, whatever the text stands for.

    Raises:
        ValueError: it stands for more, or fewer, or for nothing.
    """
    inflating = zlib.decompressobj()
    found = inflating.decompress(b64decode(text, validate=True), most + 1)
    if not least <= len(found) <= most:
        raise ValueError(f"packed values of other than {most} bytes")
    return found
