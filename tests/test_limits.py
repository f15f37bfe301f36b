"""The limits that are documented are those that hold."""

from __future__ import annotations

import re

from svdpp.config import limits
from svdpp.config.files import MAX_BYTES
from svdpp.plan.split import MAX_PLANNED_STEPS, MAX_RANKS
from tests.cli.shell import ROOT

TEXT = (ROOT / "docs" / "security.md").read_text()


def test_the_table_names_every_limit_and_its_value() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([0-9]+) \| `(MAX_[A-Z_]+)` \|$", TEXT, re.MULTILINE)
    documented = {name: float(value) for value, name in rows}
    known = {name: float(value) for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert documented == known


def test_so_are_those_of_plans_and_files() -> None:
    assert MAX_RANKS == MAX_PLANNED_STEPS == 65536
    assert "may have 65536 ranks" in TEXT
    assert MAX_BYTES == 1_000_000
    assert "are read up to 1 MB" in TEXT
