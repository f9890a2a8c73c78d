"""Decisions in words: each sentence written out by hand."""

from __future__ import annotations

import numpy as np

from prunecli.analysis.explanation import cuts, sentence, summary
from prunecli.model.decision import Decision, Origin, Ranked

ORIGIN = Origin(files=(("gates.json", "0123456789abcdef"),), texts=("eng-fra",), split="dev")
ON = "; measured on 40 tokens of eng-fra, split dev, in gates.json (sha256 0123456789ab…)."


def said(decision: Decision, at: int, index: int = 0) -> str:
    return sentence(decision, decision.places[index], at, "It")


def test_experts_of_one_layer():
    values = [1.0, 0.25, 4.0, 0.5, 0.5]
    place = Ranked.of(("a", "encoder", 3), range(5), [0, 2, 3], values, tokens=40)
    decision = Decision("expert", (place,), "importance", "per-layer", origin=ORIGIN)
    assert said(decision, 0) == (
        f"It was kept: its importance 1 is rank 2 of 5, 0.5 above the cut-off 0.5{ON}"
    )
    assert said(decision, 1) == (
        f"It was removed: its importance 0.25 is rank 5 of 5, 0.25 below the cut-off 0.5{ON}"
    )
    assert said(decision, 4) == (
        f"It was removed: its importance 0.5 is rank 4 of 5, the cut-off 0.5{ON} "
        "2 have this value, of which 1 are kept: their order decided."
    )
    assert cuts(decision).rows == [
        {
            "place": "encoder layer 3",
            "before": "5",
            "kept": "3",
            "cut-off": "0.5",
            "lowest kept": "3: 0.5",
            "highest removed": "4: 0.5",
            "gap / spread": "0.000",
        }
    ]
    assert summary(decision)[0] == "3 of 5 experts kept by importance; per-layer."


def test_a_head_that_its_layer_needs_says_so():
    # 0.1 and 0.2 go; 0.15 is the last one of its attention.
    places = [
        Ranked.of(("a", "decoder", 0), [0, 1, 2], [2], [0.1, 0.2, 0.9], attention="cross", cut="heads"),
        Ranked.of(("b", "decoder", 1), [1], [1], [0.15], attention="decoder", cut="heads"),
    ]
    decision = Decision("head", tuple(places), "importance", least="every attention keeps 1 at least")
    assert said(decision, 0, 1) == (
        "It was kept: its importance 0.15 is rank 3 of 4, 0.75 below the cut-off 0.9; every attention keeps 1 at "
        "least; of the weights alone."
    )
    assert said(decision, 1, 0) == (
        "It was removed: its importance 0.2 is rank 2 of 4, 0.7 below the cut-off 0.9; of the weights alone."
    )


def test_tokens_say_what_they_are_needed_for():
    place = Ranked.of(
        ("", "", None),
        range(4),
        [0, 1, 2],
        [3.0, 1.0, 0.0, 1.0],
        reasons=("asked for", "characters and bytes"),
        reason=np.array([0, 1, 2, 0], np.uint8),
        labels=("a", "b", "c", "d"),
    )
    decision = Decision("token", (place,), "count", bound=2, origin=Origin(sentences=5, sha256="ab" * 32))
    on = "; measured on 5 sentences, sha256 abababababab…."
    assert (
        said(decision, 0) == f"It was kept: it occurs 3 times; tokens that occur 2 times or more are kept{on}"
    )
    assert said(decision, 1) == f"It was kept: it occurs once; --keep asks for it{on}"
    assert (
        said(decision, 2)
        == f"It was kept: it occurs 0 times; single characters and bytes are always kept{on}"
    )
    assert said(decision, 3) == (
        f"It was removed: it occurs once; tokens that occur 2 times or more are kept{on}"
    )
