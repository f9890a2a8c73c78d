"""The `prunecli` command, and `python -m prunecli`."""

import sys


def main() -> None:
    """Import the command line and run it; Ctrl-C in the course of the import is said in a line too."""
    try:
        from prunecli.commands.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted: no output is half-written.\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
