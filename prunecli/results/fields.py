"""What the fields of result files have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LARGEST = 1e15
"""No figure of a result is larger; a chart of larger ones would overflow."""
Count = Annotated[int, Field(ge=0, le=10**18)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class Schema(BaseModel):
    """Fields that must be there and of their kind; others are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
