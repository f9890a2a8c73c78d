"""What the commands print with `--json` that share FFNs or attentions between layers."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from prunecli.results.document import Count, Record
from prunecli.results.rewriting import Figure, Rewriting
from prunecli.results.tabled import Tables, scalars


class FfnGroup(Record):
    """Layers that run one FFN, which is stored under the owner's name.

    Attributes:
        sources: what it is made of.
        init: how: mean, first, last, concat; keep: it is as it was.
        scale: factor of its output.
    """

    owner: str
    members: list[str]
    sources: list[str]
    init: str
    width: Count
    scale: Figure
    parameters: Count


class FfnSharing(Rewriting):
    """What `share-ffn --json` prints.

    Attributes:
        removed: layers without an FFN.
        sparse: layers with experts, which stay as they are.
    """

    FORMAT: ClassVar[str] = "prunecli.ffn-plan/1"

    groups: list[FfnGroup]
    removed: list[str] = Field(default_factory=list)
    sparse: list[str] = Field(default_factory=list)

    def _own_tables(self) -> Tables:
        """`groups`: an FFN that is stored; `layers`: a layer and whose FFN it runs."""
        return {
            "groups": [
                {**scalars(group.to_json()), "members": len(group.members), "sources": len(group.sources)}
                for group in self.groups
            ],
            "layers": [{"name": name, "owner": one.owner} for one in self.groups for name in one.members],
        }


class AttentionGroup(Record):
    """Layers that run one attention, which is stored under the owner's name.

    Attributes:
        sources: what it is made of.
        init: how: mean, first, last; keep: it is as it was.
        heads: original ids of its heads.
    """

    owner: str
    members: list[str]
    sources: list[str]
    init: str
    heads: list[int]
    parameters: Count


class AttentionSharing(Rewriting):
    """What `share-attention --json` prints.

    Attributes:
        removed: attentions that are gone.
    """

    FORMAT: ClassVar[str] = "prunecli.attention-plan/1"

    groups: list[AttentionGroup]
    removed: list[str] = Field(default_factory=list)

    def _own_tables(self) -> Tables:
        """`groups`: an attention that is stored; `layers`: an attention and whose tensors it runs."""
        counted = ("members", "sources", "heads")
        return {
            "groups": [
                {**scalars(group.to_json()), **{key: len(getattr(group, key)) for key in counted}}
                for group in self.groups
            ],
            "layers": [{"name": name, "owner": one.owner} for one in self.groups for name in one.members],
        }
