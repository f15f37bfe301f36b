"""A fixture for hosts, or the reason why this machine cannot provide them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts, NoHosts, made

MakeHosts = Callable[..., Hosts]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Creates hosts on one network; see `made`."""
    with contextlib.ExitStack() as stack:

        def make(num_hosts: int, **link: float) -> Hosts:
            try:
                return stack.enter_context(made(num_hosts, tmp_path, **link))
            except NoHosts as reason:
                pytest.skip(str(reason))

        yield make
