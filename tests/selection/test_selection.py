"""A kind of units that nothing else knows is scored, selected, stored and explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter

from prunecli.analysis.explanation import component_name, place_rows, sentence, summary
from prunecli.methods.options import UnitOptions
from prunecli.methods.units import by_scores, plan
from prunecli.model.axes import Axis
from prunecli.model.checkpoint import open_model
from prunecli.results.decisions import Written
from prunecli.results.matching import scores_for
from prunecli.results.unit_scores import Scores, scores_of
from prunecli.selection.select import Budget
from prunecli.tensors.documents import write_json
from tests.families import tiny_family

CHANNELS = Axis("channels", "channel", (0, 1, 2, 3), 4)  # type: ignore[arg-type]


class ChannelOptions(UnitOptions):
    """Options of a command that is not there."""

    COMMAND = "prune-channels"
    KIND: ClassVar[Any] = "channel"
    UNITS = "channels"
    METHODS = ("norm-mean",)


def test_channels_are_scored_selected_and_explained(tmp_path: Path) -> None:
    with open_model(tiny_family(tmp_path / "model", "llama")) as model:
        for number, sums in enumerate(([8.0, 2.0, 6.0, 4.0], [0.0, 2.0, 6.0, 4.0])):
            made = scores_of(
                model,
                kind="channel",
                method="norm-mean",
                examples=1,
                per="token",
                ids={"channels": [0, 1, 2, 3]},
                values={"channels": sums},
                counts={"channels": 4},
            )
            write_json(tmp_path / f"{number}.json", made.to_json())
        options = ChannelOptions(ratio=0.5, scores=(tmp_path / "0.json", tmp_path / "1.json"))
        assert not options.needs_text
        scores = scores_for(model, options.scores, options.KIND, [CHANNELS])
        assert isinstance(scores, Scores)
        assert scores.importance()["channels"].tolist() == [1.0, 0.5, 1.5, 1.0]
        values = scores.picked([CHANNELS])
        budget, ranking = Budget(options.ratio, least=1), by_scores(scores, values, options, scores.method)
        made_of = plan(model, options, [CHANNELS], budget, ranking, {"ratio": options.ratio})
    assert made_of.kept == {"channels": (0, 2)}
    assert made_of.step["command"] == "prune-channels"
    assert made_of.reasons[0].startswith("Channels by norm-mean, from ")
    decision = made_of.decision
    assert decision is not None
    stored = TypeAdapter(Written)
    again = stored.validate_python(json.loads(json.dumps(stored.dump_python(decision))))
    assert again.kept == made_of.kept
    (place,) = again.places
    assert component_name(again, place, 3) == "Channel 3"
    assert sentence(again, place, 3, "It").startswith("It was dropped: its norm-mean 1 is rank 3 of 4")
    assert summary(again)[0].startswith("2 of 4 channels kept by norm-mean")
    assert place_rows(again)[0].place == "channels"
