"""`python -m prunecli`: the same as the `prunecli` command."""

from __future__ import annotations

from prunecli.commands.app import main

if __name__ == "__main__":
    main()
