"""The documentation names files that exist, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "deploy/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
)

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SOURCE_FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|md|yaml))`")


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    wrong = []
    for link in links:
        if link.startswith(("http://", "https://", "../../")):  # the last: pages of the repository
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)

    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it tells of files of earlier versions
    named = _SOURCE_FILE.findall(page.read_text(encoding="utf-8"))

    assert [n for n in named if not ((ROOT / n).exists() or (ROOT / "svdpp" / n).exists())] == []
