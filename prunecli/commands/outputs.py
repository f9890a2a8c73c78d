"""What commands that measure check of their outputs before the work begins."""

from __future__ import annotations

from pathlib import Path

from prunecli.errors import UsageError
from prunecli.tensors.documents import refuse_unwritable


def check_outputs(output: Path, plot: Path | None = None, *, force: bool) -> None:
    """Refuse what could not be written in the end.

    Raises:
        OutputError: one of them exists and `force` is not given, is a directory, or lies in none.
        UsageError, PruneError: as `check_plot`.
    """
    refuse_unwritable(output, force=force)
    if plot is not None:
        check_plot(plot, force=force)


def check_plot(plot: Path, *, force: bool) -> None:
    """Refuse a picture that could not be written in the end.

    Raises:
        OutputError: it exists and `force` is not given, is a directory, or lies in none.
        UsageError: it is no PNG file.
        PruneError: there is no matplotlib.
    """
    from prunecli.analysis.plots import require_matplotlib

    refuse_unwritable(plot, force=force)
    if plot.suffix.lower() != ".png":
        raise UsageError(f"--plot {plot}: only PNG is drawn", "Choose a name that ends in .png.")
    require_matplotlib()
