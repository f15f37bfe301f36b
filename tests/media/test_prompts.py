"""Prompts: read from text files in any encoding, and used for clip names in any script."""

from __future__ import annotations

import codecs

import pytest

from svdpp.media.prompts import parse_prompts, slugify_prompt

TEXT = "# remarks\r\n\r\n  \u6d77\u4e0a\u65e5\u51fa \r\n  # also one\r\na cat, #3\r\n"
PROMPTS = ["\u6d77\u4e0a\u65e5\u51fa", "a cat, #3"]


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        codecs.BOM_UTF8 + TEXT.encode(),
        codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
        codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"),
        codecs.BOM_UTF32_BE + TEXT.encode("utf-32-be"),
        codecs.BOM_UTF8 + TEXT.replace("a cat", "\ufeffa \ufeffcat").encode(),  # BOMs left by `cat`
        TEXT.replace("\r\n", "\n").encode(),
    ],
)
def test_any_editor_s_file_gives_the_same_prompts(data: bytes) -> None:
    assert parse_prompts(data, "--prompts 'x'") == PROMPTS


def test_a_line_ends_nowhere_but_at_its_end() -> None:
    assert parse_prompts("a\u2028b\x0cc".encode(), "x") == ["a\u2028b\x0cc"]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A cat, running!", "a-cat-running"),
        ("\u6d77\u4e0a\u65e5\u51fa\u3002", "\u6d77\u4e0a\u65e5\u51fa"),
        ("\u0939\u093f\u0928\u094d\u0926\u0940 x", "\u0939\u093f\u0928\u094d\u0926\u0940-x"),
        ("../e\u0301tude/..", "\xe9tude"),
        ("\U0001f600 !", ""),
        ("x" * 60, "x" * 48),
    ],
)
def test_words_for_a_name(prompt: str, name: str) -> None:
    assert slugify_prompt(prompt) == name
