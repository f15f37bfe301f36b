"""Code blocks, code spans, links, headings and tables of Markdown pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token


@dataclass(frozen=True)
class CodeBlock:
    """Fenced code block of a Markdown page."""

    language: str
    text: str


def _tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page)


def _inline(page: str) -> Iterator[Token]:
    for token in _tokens(page):
        yield from token.children or ()


def code_blocks(page: str, language: str | None = None) -> list[CodeBlock]:
    """Return the fenced code blocks of a Markdown page.

    Args:
        page: Markdown text of the page.
        language: Only blocks of this language; None: all.
    """
    blocks = [
        CodeBlock(token.info.strip(), token.content)
        for token in _tokens(page)
        if token.type == "fence"
    ]
    return [block for block in blocks if language in (None, block.language)]


def code_spans(page: str) -> list[str]:
    """Return the texts in backticks of a Markdown page, including those in tables."""
    return [token.content for token in _inline(page) if token.type == "code_inline"]


def links(page: str) -> list[str]:
    """Return the targets of a Markdown page's links and images."""
    found = []
    for token in _inline(page):
        for name in ("href", "src"):
            if name in token.attrs:
                found.append(str(token.attrs[name]))
    return found


def headings(page: str) -> list[str]:
    """Return the texts of a Markdown page's headings, as Markdown."""
    return [
        text.content for opening, text in pairwise(_tokens(page)) if opening.type == "heading_open"
    ]


def table_rows(page: str) -> list[list[str]]:
    """Return the rows of a Markdown page's tables, including header rows, by cells."""
    rows: list[list[str]] = []
    for opening, content in pairwise(_tokens(page)):
        if opening.type == "tr_open":
            rows.append([])
        if opening.type in ("th_open", "td_open"):
            rows[-1].append(content.content)
    return rows
