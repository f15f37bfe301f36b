"""The documentation names files that exist, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path for pattern in ("*.md", "docs/*.md", ".github/**/*.md") for path in ROOT.glob(pattern)
)
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")

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


def test_the_tree_has_every_file() -> None:
    tree = ARCHITECTURE.partition("## Every file\n\n```\n")[2].partition("```")[0]
    listed: set[str] = set()
    folders: list[str] = []
    for line in filter(None, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        names = line.split("  ")[depth].split(", ")
        if names[0].endswith("/"):
            folders = [*folders[:depth], names[0]]
        else:
            listed |= {"".join(folders[:depth]) + name for name in names}

    assert listed == {
        str(path.relative_to(ROOT))
        for path in (ROOT / "svdpp").rglob("*")
        if path.suffix in (".py", ".j2")
        and (path.name != "__init__.py" or path.parent == ROOT / "svdpp")
    }
