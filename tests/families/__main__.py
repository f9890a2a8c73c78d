"""Build every tiny model and print a table: `python -m tests.families [model type ...]`."""

from __future__ import annotations

import sys
import time

import transformers
from torch import nn

from tests.families import masked, tiny


def main() -> None:
    """Print a row for every model type and head, and the processor time of building alone."""
    transformers.logging.set_verbosity_error()
    total = 0.0
    for model_type in sys.argv[1:] or tiny.model_types():
        for head in tiny.heads(model_type):
            name = tiny.auto_class(model_type, head).__name__  # imports the module, outside the clock
            started = time.process_time()
            try:
                model = tiny.build(model_type, head=head)
                seconds = time.process_time() - started
                total += seconds
                logits = masked.logits(model, tiny.inputs(model))
            except Exception as error:
                sys.stdout.write(f"{model_type} {head} {name}: {type(error).__name__}: {str(error)[:150]}\n")
                continue
            lists = [path for path, part in model.named_modules() if isinstance(part, nn.ModuleList)]
            outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
            sys.stdout.write(
                f"{model_type} {head} {name} parameters={model.num_parameters()} seconds={seconds:.2f}"
                f" finite={bool(logits.isfinite().all())} std={logits.std():.2f} lists={','.join(outer)}\n"
            )
    sys.stdout.write(f"{total:.1f} s of processor time\n")


if __name__ == "__main__":
    main()
