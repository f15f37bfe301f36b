"""Pages hold what they show, and no text in them becomes markup."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
from PIL import Image

from svdpp.verification.html import Html, picture, table, tag, write_page


def test_text_is_escaped_and_html_is_not() -> None:
    element = tag("p", "<b>&", tag("b", '"'), class_='a"b')
    assert element == '<p class="a&quot;b">&lt;b&gt;&amp;<b>&quot;</b></p>'


def test_numbers_of_a_table_are_aligned_right() -> None:
    text = table(("a",), [("1e-3",), ("x",), (Html("2"),)])
    assert text == (
        '<table><tr><th>a</th></tr><tr><td class="number">1e-3</td></tr>'
        "<tr><td>x</td></tr><tr><td>2</td></tr></table>"
    )


def test_a_picture_is_the_png_of_its_pixels() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    element = picture(pixels, 'a "frame"')
    data = re.search(r'base64,([^"]*)"', element)
    assert data is not None
    with Image.open(io.BytesIO(base64.b64decode(data[1]))) as image:
        assert np.array_equal(np.asarray(image), pixels)
    assert 'alt="a &quot;frame&quot;"' in element


def test_a_page_needs_nothing_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, "<title>", [tag("p", "text")])
    text = path.read_text()

    assert text.startswith("<!DOCTYPE html>")
    assert "<title>&lt;title&gt;</title>" in text
    assert not re.search(r"<script|<link|@import|url\(|https?:", text)


def test_a_name_that_is_not_utf_8_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "t", [tag("p", "caf\udce9.jpg")])
    assert "<p>caf?.jpg</p>" in (tmp_path / "page.html").read_text(encoding="utf-8")
