"""Text never becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunecli.report.markup import Html, element, join, number, table
from prunecli.tensors.quantities import bytes_text, counted


class _Read(HTMLParser):
    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.data = [], [], ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.data += data


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_any_text_is_told_and_nothing_more(text, attribute):
    made = element("p", text, title=attribute)
    made.encode("utf-8")
    read = _Read(made)
    shown, told = (
        "".join(mark if mark.isprintable() or mark in "\n\t" else "\ufffd" for mark in value)
        for value in (text, attribute)
    )
    assert read.tags == ["p"]
    assert read.data == shown
    assert read.attributes == [("title", told)]


def test_markup_stays_and_text_beside_it_is_escaped():
    assert element("p", element("a", "<b>", href="#x"), " & ") == '<p><a href="#x">&lt;b&gt;</a> &amp; </p>'
    assert join(("<", Html("<br>"))) == "&lt;<br>"
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_attributes_that_are_none_are_left_out():
    assert (
        element("p", class_=None, aria_label="x", hidden=True, x=1.50)
        == '<p aria-label="x" hidden x="1.5"></p>'
    )


@pytest.mark.parametrize("name", ["", "a b", "a>", 'a"', "1a", "a\n"])
def test_names_that_nothing_has_are_refused(name):
    with pytest.raises(ValueError, match="no name of an element"):
        element(name)
    with pytest.raises(ValueError, match="no name of an attribute"):
        element("p", **{name: "1"})


def test_a_table_has_a_caption_and_named_rows():
    columns = {"name": lambda row: row[0], "a": lambda row: row[1], "b": lambda row: None}
    drawn = table("What <it> shows", [("x<y", "1"), ("z", None)], columns)
    assert "<caption>What &lt;it&gt; shows</caption>" in drawn
    assert '<th scope="row">x&lt;y</th>' in drawn
    assert '<td class="n">1</td>' in drawn
    assert '<th scope="row">z</th><td class="n">–</td>' in drawn
    assert ">b</th>" not in drawn, "a column without any cell"


def test_numbers_in_words():
    assert [number(value) for value in (12.5, 3.0, 0.001, -0.25)] == ["12.5", "3", "0", "-0.25"]
    assert [bytes_text(value) for value in (5, 1536, 3 << 20, 1610612736)] == [
        "5 B",
        "1.50 KiB",
        "3.00 MiB",
        "1.50 GiB",
    ]
    assert (counted(1, "pair"), counted(1200, "pair")) == ("1 pair", "1,200 pairs")
