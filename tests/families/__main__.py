"""Cut the tiny models of found families, write the table of docs/reference/families.md: `python -m tests.families`."""

import math
import re
import sys
import tempfile
from pathlib import Path

import transformers

from prunecli.architectures import NLLB_MOE
from tests.families import cutting, tiny

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
NAMES = {
    "expert": "experts",
    "layer": "layers",
    "unit": "hidden units",
    "uneven unit": "uneven hidden units",
    "expert unit": "hidden units of experts",
    "head": "heads",
    "uneven head": "uneven heads",
    "share ffn": "share-ffn",
    "share attention": "share-attention",
    "drop ffn": "dropped FFNs",
    "drop attention": "dropped attentions",
    "token": "tokens",
    "channel": "channels",
}
NEAR = 2e-4


def main() -> None:
    """Print what each type can lose; without types, write it into the page too."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    types = [name for name in tiny.model_types() if name != NLLB_MOE.model_type]
    groups = {}
    wrong = []
    for model_type in sys.argv[1:] or types:
        with tempfile.TemporaryDirectory() as directory:
            try:
                told = cutting.outcome(model_type, Path(directory))
            except Exception as error:  # a result that does not open, or does not run
                told = {"layer": math.nan, "why": repr(error)}
        sys.stdout.write(f"{model_type}: {told}\n")
        wrong += [model_type for value in told.values() if isinstance(value, float) and not value < NEAR]
        found = [kind for kind in NAMES if isinstance(told.get(kind), float)]
        able = [NAMES[kind] for kind in found if kind != "uneven unit" or "unit" not in found]
        groups.setdefault(", ".join(able) or "nothing", []).append(f"`{model_type}`")
    rows = sorted(groups.items(), key=lambda group: -len(group[1]))
    table = "\n".join(f"| {able} | {len(names)} | {', '.join(names)} |" for able, names in rows)
    sys.stdout.write(f"{table}\nwrong: {wrong}\n")
    if not sys.argv[1:]:
        text = PAGE.read_text(encoding="utf-8")
        made = f"<!-- found -->\n| can lose or share | types | |\n| --- | ---: | --- |\n{table}\n<!-- end -->"
        PAGE.write_text(
            re.sub(r"<!-- found -->.*<!-- end -->", lambda _: made, text, flags=re.DOTALL), encoding="utf-8"
        )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
