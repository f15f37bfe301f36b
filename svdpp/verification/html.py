"""Owns HTML pages that need nothing beside themselves: escaped text, tables, embedded pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from svdpp.media import output_files

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1e21; max-width: 72rem;
  margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0 .6rem; } .faint { color: #6a6f76; }
.verdict { padding: .8rem 1.1rem; border-radius: 6px; border-left: 6px solid; }
.verdict b { font-size: 1.2rem; display: block; }
.good { color: #1a7f37; } .fair { color: #9a6700; } .bad { color: #c62828; }
.verdict.good { background: #e9f7ec; } .verdict.fair { background: #fff6dc; }
.verdict.bad { background: #fdecea; } .verdict p { color: #1c1e21; margin: 0; }
.scroll { max-height: 24rem; overflow: auto; }
table { border-collapse: collapse; } th { text-align: left; font-weight: 600; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #e4e6e9; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
code { font: 13px ui-monospace, monospace; }
.strip td, .strip th { border: 0; padding: .15rem .6rem .15rem 0; vertical-align: middle; }
.strip img { display: block; width: 15rem; image-rendering: pixelated; background: #000; }
"""


class Html(str):
    """Text that is HTML already; every other text is escaped where it is put into a page."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str) -> Html:
    """An element; `class_` and the like lose their underscore."""
    inside = "".join(map(_escaped, content))
    words = "".join(
        f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{words}>{inside}</{name}>")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], **attributes: str) -> Html:
    """A table; numbers are aligned right, a row's own HTML is kept."""
    head = tag("tr", *(tag("th", column) for column in columns))
    body = (tag("tr", *map(_cell, row)) for row in rows)
    return tag("table", *([head] if columns else []), *body, **attributes)


def picture(pixels: npt.NDArray[np.uint8], text: str) -> Html:
    """A PNG inside the page.

    Args:
        pixels: shape (H, W) or (H, W, 3).
        text: for those who cannot see it.
    """
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", optimize=True)
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return Html(f'<img src="{source}" alt="{html.escape(text)}">')


def write_page(path: Path, title: str, content: Iterable[Html]) -> None:
    """Writes one page, whole or not at all; replaces what is there.

    Raises:
        OutputError: the file cannot be written.
    """
    head = Html(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"{tag('title', title)}<style>{_STYLE}</style>"
    )
    whole = tag("html", tag("head", head), tag("body", *content), lang="en")
    with output_files.atomic_output(str(path), ".html") as temporary:
        temporary.write_text(f"<!DOCTYPE html>\n{whole}\n", encoding="utf-8", errors="replace")


def _cell(value: str) -> Html:
    is_number = not isinstance(value, Html) and value[:1].isdigit()
    return tag("td", value, **({"class_": "number"} if is_number else {}))


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text)
