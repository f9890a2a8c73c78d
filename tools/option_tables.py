"""Write the tables of options in docs/reference/commands/ from the options classes of the commands.

python -m tools.option_tables            # write
python -m tools.option_tables --check    # exit with status 1 if a page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from prunecli.commands.command import COMMANDS, function_of, options_of
from prunecli.options import Options

PAGES = Path(__file__).parents[1] / "docs" / "reference" / "commands"
BEGIN, END = "<!-- options, from tools/option_tables.py -->\n", "<!-- end of options -->\n"


def current(name: str) -> str:
    """Return the page of a command with its present options.

    Args:
        name: of the command.

    Raises:
        ValueError: the page has no place for them.
    """
    before, rest = (PAGES / f"{name}.md").read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(options_of(function_of(name)))}\n{END}{after}"


def table(options: type[Options]) -> str:
    """Return the options as a table of Markdown."""
    rows = ["| option | meaning |", "| --- | --- |"]
    for one in options.list_options().values():
        metavar = "" if one.is_switch else f" {one.metavar}"
        names = one.metavar if one.argument else f"{one.flag}{metavar}"
        spelt = [names, *filter(None, (one.short, one.negative if one.negative != one.flag else ""))]
        shown = ", ".join(f"`{name}`" for name in spelt).replace("|", "\\|")
        rows.append(f"| {shown} | {one.described.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


def main(check: bool) -> int:
    """Write the pages, or only name those that are out of date.

    Args:
        check: whether nothing is written.

    Returns:
        The exit status.
    """
    names = [name for names in COMMANDS.values() for name in names]
    old = [name for name in names if current(name) != (PAGES / f"{name}.md").read_text("utf-8")]
    for name in old:
        if not check:
            (PAGES / f"{name}.md").write_text(current(name), encoding="utf-8")
        print(f"{name}.md: {'out of date' if check else 'written'}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
