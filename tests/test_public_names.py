"""`import svdpp` is light, and its public names and their types agree."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import svdpp
from svdpp.verification import verify

_NAMES = [name for name in svdpp.__all__ if name != "__version__"]


def test_importing_svdpp_imports_no_torch() -> None:
    program = "import sys, svdpp; assert not {'torch', 'pydantic', 'PIL'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_each_public_name_is_there_and_in_the_stub() -> None:
    stub = Path(svdpp.__file__).with_suffix(".pyi").read_text()
    imported = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(map(str, imported)) == sorted(_NAMES)
    assert set(_NAMES) <= set(dir(svdpp))
    for name, path in imported.items():
        value = getattr(svdpp, str(name))
        module, _, original = path.rpartition(".")
        assert getattr(sys.modules[module], original) is value


@pytest.mark.processes
def test_an_example_in_a_docstring_runs() -> None:
    found = doctest.testmod(verify)
    assert found.attempted > 0
    assert found.failed == 0
