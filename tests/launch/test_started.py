"""Started ranks print to a file, whatever writes."""

from __future__ import annotations

import os

import pytest

from svdpp.launch.group import RankContext
from svdpp.launch.started import StartedGroup


def _print_and_fail(context: RankContext, _argument: object) -> None:
    print(f"printed by rank {context.world.rank}")
    os.write(2, b"written without Python\n")
    raise ValueError("on purpose")


@pytest.mark.processes
def test_the_output_of_ranks_is_kept_off_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    group = StartedGroup(_print_and_fail, None, world_size=2, backend="gloo")
    assert not group.end(60)
    output = group.output_tail(1) or ""
    group.kill()
    assert group.exited() == {0: 1, 1: 1}
    assert "printed by rank 1" in output
    assert "written without Python" in output
    assert "ValueError: on purpose" in output
    captured = capfd.readouterr()
    assert "printed by" not in captured.out + captured.err
