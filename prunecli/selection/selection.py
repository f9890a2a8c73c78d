"""Which units stay: what every pruning method returns and `cut` carries out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunecli.model.decision import Decision


@dataclass(frozen=True)
class Selection:
    """Which units stay, and why.

    Attributes:
        kept: name of an axis -> ids of the units that stay (see `Axis.ids`); an axis that is left out keeps all.
        dtype: type of the result's floating-point tensors (`float16`, `F16`, …); None: as stored.
        step: the entry for `Structure.history`.
        reasons: plain lines that say how the units were chosen.
        decision: by what; None: they are given.
        dropped: names of tensors that go besides.
        settings: keys of config.json that change besides, and their new values; `text_config.top_k` lies in another.
        files: side files that differ from the source's, by name; None: it is left out.
    """

    kept: Mapping[str, Collection[int]]
    dtype: str | None = None
    step: Mapping[str, object] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    decision: Decision | None = None
    dropped: Collection[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | None] = field(default_factory=dict)
