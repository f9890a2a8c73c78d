"""What the names of published mixtures of experts are to prunecli: expert, companion, router, vector, shared, rest.

    python benchmarks/mixture_names.py DIRECTORY...

Each directory holds config.json and, where the model has one, model.safetensors.index.json: no weights are needed. A
model whose names are all accounted for has every expert of every sparse layer, its router, and no name of an expert
anywhere else.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from prunecli.architectures import EXPERTS_ONLY, NLLB_MOE
from prunecli.architectures.records import Mixture
from prunecli.model.declared import Sizes
from prunecli.model.mixtures import OF_AN_EXPERT, blocks_of, experts_of, stated_counts

KINDS = ("expert", "companion", "router", "vector", "shared", "block", "rest", "ASTRAY")
WEIGHTS = (".weight", "_proj")
"""How the names of what an unquantised expert is made of end."""


def kinds_of(names: Iterable[str], mixture: Mixture) -> Iterator[str]:
    """One of KINDS for each name."""
    blocks, others = blocks_of(dict.fromkeys(names), mixture)
    for members in blocks.values():
        experts, rest = experts_of(mixture, members)
        for own in experts.values():
            yield from ("expert" if suffix.endswith(WEIGHTS) else "companion" for suffix in own)
        yield from (_of_all(suffix, mixture) for suffix in rest)
    yield from ("ASTRAY" if OF_AN_EXPERT.search(name) else "rest" for name in others)


def _of_all(suffix: str, mixture: Mixture) -> str:
    """Of a tensor that is no single expert's."""
    if mixture.stacked and suffix.startswith(mixture.stacked):
        return "expert" if suffix.endswith(WEIGHTS) else "companion"
    if suffix in mixture.router:
        return "router"
    if suffix in mixture.vectors:
        return "vector"
    return "shared" if suffix.startswith(mixture.shared) else "block"


def names_of(directory: Path) -> list[str]:
    """Of all tensors that an index lists; none where there is no index."""
    return [
        name
        for path in sorted(directory.glob("*.index*.json"))
        for name in json.loads(path.read_text(encoding="utf-8")).get("weight_map", {})
    ]


def main(directories: list[Path]) -> int:
    """Print a line for each; the status is 1 where a name of an expert is astray."""
    astray = 0
    for directory in directories:
        path = directory / "config.json"
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        model_type = str(config.get("model_type"))
        family = {NLLB_MOE.model_type: NLLB_MOE, **EXPERTS_ONLY}.get(model_type)
        names = names_of(directory)
        if family is None or family.mixture is None:
            if family is None and any("expert" in text for text in (*names, json.dumps(config))):
                print(f"{directory.name}: {model_type}: not declared")
            continue
        kinds = Counter(kinds_of(names, family.mixture))
        said = ", ".join(f"{kind} {kinds[kind]:,}" for kind in KINDS if kinds[kind]) or "no index"
        counts = stated_counts(Sizes(family, config), family.mixture)
        print(f"{directory.name}: {model_type}: {said}; {counts or 'no count stated'}")
        astray += kinds["ASTRAY"]
    return int(astray > 0)


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
