"""Fixture with input files for the tests of families."""

from __future__ import annotations

import pytest

from tests.support.clip_inputs import Inputs, create_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Input files of clips: images, and videos of noise."""
    return create_inputs(tmp_path_factory.mktemp("inputs"))
