"""Options of `factorize-embeddings`."""

from typing import Literal

from prunecli.model.define import UnitKind
from prunecli.options import (
    STORED_DTYPE,
    Options,
    StoredDtype,
    advanced_option,
    compute_option,
    hidden_option,
    option,
)

Sides = Literal["input", "output", "both"]


class EmbeddingOptions(Options):
    """Options of `factorize-embeddings`."""

    map_dim: int | None = option(
        "Width n of the table that is left. Default: about an eighth of the model's width."
    )
    expand_dim: int | None = option(
        "Width k to which rows are expanded. Default: about twice the model's width.", metavar="K"
    )
    depth: int | None = option("Number of expansion layers. Default: 3.", metavar="L")
    max_groups: int | None = option(
        "Groups of the first layer; each further layer has half as many. Default: 4.", metavar="G"
    )
    side: Sides | None = option(
        "Tables to factorize: input, output or both. Default: both if input and output share one, else input.",
    )
    cache: bool = option(
        "Write the rows that the unit computes as an ordinary table, so that inference skips the unit. If the "
        "checkpoint is factorized already, nothing is fitted.",
        False,
        excludes="side=output",
    )
    epochs: int | None = compute_option(
        "Largest number of passes over the table; 0: the projective embedding as a unit. Default: about a million "
        "rows, 4 to 60 passes.",
        ge=0,
    )
    dtype: StoredDtype | None = STORED_DTYPE
    seed: int = advanced_option(
        "Seed of everything random.",
        0,
        ge=0,
    )
    kind: UnitKind | None = hidden_option(
        "define, an ablation of it from the paper, or projective: without expansion. Default: define.",
    )
    shared_blocks: bool = hidden_option(
        "One block of weights for all groups of a layer, as in appendix A.1 of the paper, instead of one for each.",
        False,
    )
    reduction: bool = hidden_option(
        "No linear layer from k to the model's width: the last expansion layer makes the row (Table 8b).",
        True,
        flag="--no-reduction",
    )
