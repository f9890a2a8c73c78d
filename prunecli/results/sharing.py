"""What `share-ffn` and `share-attention` print with `--json`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from prunecli.results.document import Count, Record
from prunecli.results.rewriting import Figure, Rewriting
from prunecli.results.tabled import Row, Tables, scalars


class SharedGroup(Record):
    """Layers that run one FFN or attention, which is stored under the owner's name.

    Attributes:
        sources: what it is made of.
        init: how: mean, first, last, concat; keep: it is as it was.
        heads: of an attention, original ids of its heads.
        width: of an FFN, its hidden units.
        scale: of an FFN, factor of its output.
    """

    owner: str
    members: list[str]
    sources: list[str]
    init: str
    heads: list[int] | None = None
    width: Count | None = None
    scale: Figure | None = None
    parameters: Count


class Sharing(Rewriting):
    """What both commands print.

    Attributes:
        removed: layers without an FFN; attentions that are gone.
    """

    groups: list[SharedGroup]
    removed: list[str] = Field(default_factory=list)

    def _own_tables(self) -> Tables:
        """`groups`: an FFN or attention that is stored; `layers`: a layer's, and whose tensors it runs."""
        groups = []
        for group in self.groups:
            row: Row = group.to_json()
            counted = {key: len(row[key]) for key in ("members", "sources", "heads") if key in row}
            groups.append(scalars(row) | counted)
        return {
            "groups": groups,
            "layers": [{"name": name, "owner": one.owner} for one in self.groups for name in one.members],
        }


class FfnSharing(Sharing):
    """What `share-ffn --json` prints.

    Attributes:
        sparse: layers with experts, which stay as they are.
    """

    FORMAT: ClassVar[str] = "prunecli.ffn-plan/1"

    sparse: list[str] = Field(default_factory=list)


class AttentionSharing(Sharing):
    """What `share-attention --json` prints."""

    FORMAT: ClassVar[str] = "prunecli.attention-plan/1"
