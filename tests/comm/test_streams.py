"""Only one module makes streams and reads tensors on devices."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

import svdpp

PACKAGE = Path(svdpp.__file__).parent

# What other modules may do, and why.
ALLOWED = {
    "verification/reference.py": {"synchronize"},  # one process, which measures its own steps
    # Once for a clip and rank:
    "models/engine/model.py": {"all"},  # finite?
    "models/engine/records.py": {"numpy"},  # structure: on the host
    "models/engine/attention.py": {"cpu", "numpy"},  # a trial before a rank loads its model
    "models/engine/modular_state.py": {"numpy"},  # arrays of NumPy: on the host
    "config/families/wan.py": {"tolist"},  # timesteps: on the host
    # Take tensors on the host, from `to_host` or from files:
    "worker/tensor_files.py": {"numpy"},
    "worker/background.py": {"numpy"},
    "comm/packet.py": {"numpy"},
    "comm/transport.py": {"numpy"},
    "verification/clip_verification.py": {"numpy"},
    "verification/result.py": {"any", "max", "mean"},
}
_READS = {"numpy", "cpu", "item", "tolist"}
_REDUCTIONS = {"all", "any", "max", "min", "sum", "mean", "norm"}


def _forbidden(call: ast.Call) -> str | None:
    """What the call does if it makes a stream, waits for one, or reads a tensor on a device."""
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    if name.startswith("streams."):  # the module that may
        return None
    if name.startswith(("torch.cuda.Stream", "torch.cuda.stream", "torch.cuda.Event")):
        return name
    if method in ("record_stream", "wait_stream") or name.endswith("cuda.synchronize"):
        return method
    if isinstance(call.func, ast.Attribute) and method in _READS:
        return (
            None if ast.unparse(call.func.value).partition("(")[0].endswith("to_host") else method
        )
    if name in ("bool", "int", "float") and isinstance(call.args[0], ast.Call):
        inner = call.args[0].func
        reduces = isinstance(inner, ast.Attribute) and inner.attr in _REDUCTIONS
        return inner.attr if reduces else None
    if method == "to" and any(ast.unparse(each) == "'cpu'" for each in call.args):
        return "cpu"
    keywords = {each.arg for each in call.keywords} & {"non_blocking", "pin_memory"}
    return min(keywords, default=None)


def _forbidden_calls(source: str, allowed: Iterable[str] = ()) -> list[str]:
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [ast.unparse(call) for call in calls if _forbidden(call) not in (None, *allowed)]


def test_only_one_module_makes_streams_or_reads_tensors_on_devices() -> None:
    for path in PACKAGE.rglob("*.py"):
        source, name = path.read_text(), path.relative_to(PACKAGE).as_posix()
        has_tensors = "import torch" in source or "Tensor" in source
        if has_tensors and name != "comm/streams.py":
            assert _forbidden_calls(source, ALLOWED.get(name, ())) == [], path


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.Stream(device)",
        "latent.cpu()",
        "latent.detach().to('cpu')",
        "host.copy_(latent, non_blocking=True)",
        "torch.cuda.synchronize(device)",
        "latent.numpy()",
        "to_host(latent).equal(latent.numpy())",
        "state['order'].item()",
        "latent.shape(0).tolist()",
        "bool(torch.isfinite(latent).all())",
        "float((ours - theirs).abs().max())",
    ],
)
def test_that_test_sees_each_of_them(line: str) -> None:
    assert _forbidden_calls(line)
