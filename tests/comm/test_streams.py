"""Only one module creates streams and copies from devices; on the CPU streams do nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import svdpp
from svdpp.comm import streams

CPU = torch.device("cpu")
PACKAGE = Path(svdpp.__file__).parent

# Not part of a clip's path: the process of the reference, and memory measurements.
OUTSIDE = {"comm/streams.py", "verification/reference.py", "worker/peak_memory.py"}


def _is_forbidden(call: ast.Call) -> bool:
    """Whether the call creates a stream, waits for one, or copies a tensor from a device."""
    name = ast.unparse(call.func)
    return (
        name.startswith(("torch.cuda.Stream", "torch.cuda.stream", "torch.cuda.Event"))
        or name.endswith((".record_stream", ".wait_stream", ".cpu", "cuda.synchronize"))
        or (name.endswith(".to") and any(ast.unparse(each) == "'cpu'" for each in call.args))
        or any(each.arg in ("non_blocking", "pin_memory") for each in call.keywords)
    )


def _forbidden_calls(source: str) -> list[str]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [ast.unparse(call) for call in calls if _is_forbidden(call)]


def test_only_one_module_makes_streams_or_copies_from_devices() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).as_posix() not in OUTSIDE:
            assert _forbidden_calls(path.read_text()) == [], path


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.Stream(device)",
        "latent.cpu()",
        "latent.detach().to('cpu')",
        "host.copy_(latent, non_blocking=True)",
        "torch.cuda.synchronize(device)",
    ],
)
def test_that_test_sees_each_of_them(line: str) -> None:
    assert _forbidden_calls(line)


def test_on_the_cpu_nothing_is_copied() -> None:
    stream, tensor = streams.SideStream(CPU), torch.arange(4)
    assert stream.to_host(tensor) is tensor
    assert stream.to_device(tensor) is tensor
    assert streams.mark(CPU) is None
    assert not stream.host_buffer((3,), torch.uint8).is_pinned()
    streams.lend(tensor)
    streams.wait_for_queue(CPU)


@pytest.mark.parametrize("finite", [True, False])
def test_a_flag_is_read_back(finite: bool) -> None:
    before = streams.Readback(CPU)
    flag = torch.isfinite(torch.tensor([1.0, 2.0 if finite else torch.nan])).all()
    after = streams.Readback(CPU, flag)
    assert before.wait()
    assert after.wait() is finite
    assert after.seconds_since(before) >= 0
