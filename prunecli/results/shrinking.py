"""The JSON of `shrink`: what was tried, what was chosen, and what it costs."""

from __future__ import annotations

from prunecli.results.document import Count, Number, Record, Row, Shown, Tables, maybe
from prunecli.results.rewriting import Rewriting


class Quality(Record):
    """Quality of a model on one text.

    Attributes:
        cost: what is compared, less is better: the loss, or 1 - cosine. None: the model's outputs are not finite.
        loss: sum of the losses over the number of the original's tokens, in nats.
        divergence: mean KL divergence from the original's next-token distributions, for language models with the
            original's vocabulary.
        cosine: mean cosine of the texts' vectors to the original's.
    """

    cost: Number | None
    loss: Number | None = None
    divergence: Number | None = None
    cosine: Number | None = None


class Tried(Record):
    """A mixture that was tried.

    Attributes:
        shares: kind of units -> fraction of its units that was removed.
        metrics: kind of units -> metric that they were ranked by.
        stage: "curve" for a single kind, "whole" for a mixture that reaches the target.
        parameters, bytes: of the result.
        speedup: how many times faster than the original it is; of trials only if the target is a speed.
        quality: on the text that the mixture is chosen by.
    """

    shares: dict[str, Number]
    metrics: dict[str, str] = {}
    stage: str
    parameters: Count
    bytes: Count
    speedup: Number | None = None
    quality: Quality


class Stage(Record):
    """A row of the closing table.

    Attributes:
        model: "original", "cut" or "healed".
        parameters, bytes: of the model.
        speedup: as in `Tried`.
        quality: on text that nothing was chosen by.
    """

    model: str
    parameters: Count
    bytes: Count
    speedup: Number | None = None
    quality: Quality


class Shrunk(Rewriting):
    """The JSON that `prunecli shrink --json` prints, and that is written beside the result.

    Attributes:
        target: the target, as the command line spells it.
        shares: kind of units -> fraction of its units that was removed.
        tried: everything that was tried, in its order.
        stages: the original, the cut model, and the healed one if the result was trained.
    """

    FORMAT = "prunecli.shrinking/1"

    target: str
    shares: dict[str, Number]
    tried: list[Tried]
    stages: list[Stage] = []

    @property
    def shown(self) -> list[Shown]:
        """The original, the cut and the healed model."""
        columns = {
            "model": "{model}",
            "parameters": "{parameters:,}",
            "bytes": "{bytes!b}",
            "speed": "{speedup:.2f}x",
            "loss": "{loss}",
            "cosine to the original": "{cosine:.4f}",
        }
        rows = [
            row | {"loss": "not finite" if row["cost"] is None else maybe("{:.4f}", row.get("loss"))}
            for row in self._tables()["stages"]
        ]
        return [Shown.of("On text that nothing was chosen by", rows, columns)]

    def _tables(self) -> Tables:
        """`tried`: a mixture; `stages`: a row of the closing table."""
        tried: list[Row] = []
        for one in self.tried:
            fields = one.to_json()
            quality, shares, metrics = (fields.pop(name) for name in ("quality", "shares", "metrics"))
            tried.append(
                {**fields, **quality, **shares, **{f"{name}_by": by for name, by in metrics.items()}}
            )
        stages = [{**(row := one.to_json()), **row.pop("quality")} for one in self.stages]
        return {"tried": tried, "stages": stages}
