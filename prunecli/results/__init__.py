"""The JSON files that prunecli writes, and their tables: `read("evaluation.json").frame()`."""

from prunecli.results.reading import Result, read

__all__ = ["Result", "read"]
