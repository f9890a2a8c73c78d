"""What the names of published mixtures of experts are to prunecli: expert, companion, router, vector, shared, rest.

    python benchmarks/mixture_names.py DIRECTORY...

Each directory holds config.json and, where the model has one, model.safetensors.index.json: no weights are needed. A
model whose names are all accounted for has every expert of every sparse layer, its router, and no name of an expert
anywhere else.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prunecli.architectures import EXPERTS_ONLY, FAMILIES
from prunecli.architectures.records import Mixture

KINDS = ("expert", "companion", "router", "vector", "shared", "block", "rest", "ASTRAY")
WEIGHTS = (".weight", "_proj")
"""How the names of what an unquantised expert is made of end."""


def kind_of(name: str, mixture: Mixture) -> str:
    """One of KINDS."""
    for block in mixture.blocks:
        if match := re.match(re.escape(f"{block}.").replace(r"\{layer\}", r"\d+"), name):
            return _within(name[match.end() :], mixture)
    return "ASTRAY" if re.search(r"(?:^|\.)experts?\.", name) else "rest"


def _within(suffix: str, mixture: Mixture) -> str:
    expert = mixture.expert and re.escape(f"{mixture.expert}.").replace(r"\{expert\}", r"\d+")
    if (expert and re.match(expert, suffix)) or suffix.startswith(mixture.stacked or ("\0",)):
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


def stated(config: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Of these keys, those that config.json holds."""
    found = {}
    for key in keys:
        outer, _, inner = key.partition(".")
        values = config.get(outer, {}) if inner else config
        if isinstance(values, dict) and values.get(inner or outer) is not None:
            found[key] = values[inner or outer]
    return found


def main(directories: list[Path]) -> int:
    """Print a line for each; the status is 1 where a name of an expert is astray."""
    astray = 0
    for directory in directories:
        path = directory / "config.json"
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        model_type = str(config.get("model_type"))
        family = FAMILIES.get(model_type) or EXPERTS_ONLY.get(model_type)
        names = names_of(directory)
        if family is None or family.mixture is None:
            if family is None and any("expert" in text for text in (*names, json.dumps(config))):
                print(f"{directory.name}: {model_type}: not declared")
            continue
        kinds = Counter(kind_of(name, family.mixture) for name in names)
        said = ", ".join(f"{kind} {kinds[kind]:,}" for kind in KINDS if kinds[kind]) or "no index"
        counts = stated(config, family.mixture.counts)
        print(f"{directory.name}: {model_type}: {said}; {counts or 'no count stated'}")
        astray += kinds["ASTRAY"]
    return int(astray > 0)


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
