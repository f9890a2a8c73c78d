"""The texts whose vectors are compared: of plain text its lines, of pairs both texts, of aligned text each language."""

from __future__ import annotations

from typing import Any

from prunecli.errors import DataError
from prunecli.text.choice import Pairs, Text
from prunecli.text.labelled import LabelledText
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import PlainText


def columns(text: Text, pairs: Pairs = ()) -> dict[str, list[str]]:
    """Name of a column -> its texts, row by row; plain text is one column without a name.

    Args:
        pairs: of aligned text, whose languages alone are taken; none: all. Rows that are blank in one of them are left
            out.

    Raises:
        DataError: labelled text with one text a line.
    """
    if isinstance(text, ParallelText):
        names = dict.fromkeys(name for pair in pairs for name in pair) or dict.fromkeys(text.languages)
        whole = [row for row in range(len(text)) if all(text.sentences[name][row].strip() for name in names)]
        return {name: [text.sentences[name][row] for row in whole] for name in names}
    if isinstance(text, LabelledText):
        if text.seconds is None:
            raise DataError(
                f"{text.path}: one text a line, where pairs of texts have a similarity",
                "A line is similarity<TAB>text<TAB>second text, or JSON with the keys label, text, text_b.",
            )
        return {"first texts": list(text.texts), "second texts": list(text.seconds)}
    return {"": list(text.texts)}


def described(text: Text) -> dict[str, Any]:
    """The fields of a result that tell which text was read: `files`, `sha256`, and `whole_files` of plain text."""
    if isinstance(text, ParallelText):
        files = [f"{text.split}.{language}" for language in text.languages]
    else:
        files = [path.name for path in text.files]
    whole = {"whole_files": text.whole_files} if isinstance(text, PlainText) else {}
    return {"files": files, "sha256": text.sha256, **whole}
