"""Only the module `streams` creates CUDA streams and reads device tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

import svdpp

PACKAGE = Path(svdpp.__file__).parent

# Calls that other modules may make, with the reason.
ALLOWED = {
    "verification/reference.py": {"synchronize"},  # to measure the steps of one process
    # Calls that a rank makes once for each clip, or only on tensors in host memory:
    "models/engine/model.py": {"all"},  # checks that the latent is finite
    "models/engine/records.py": {"numpy"},  # the structure is in host memory
    "models/engine/attention.py": {"cpu", "numpy"},  # a trial before the model is loaded
    "models/engine/modular_state.py": {"numpy"},  # converts NumPy arrays in host memory
    "config/families/wan.py": {"tolist"},  # the timesteps are in host memory
    # Only on tensors in host memory, which come from `to_host` or from files:
    "worker/tensor_files.py": {"numpy"},
    "worker/background.py": {"numpy"},
    "comm/packet.py": {"numpy"},
    "comm/transport.py": {"numpy"},
    "verification/clip_verification.py": {"numpy"},
    "verification/result.py": {"any", "max", "mean"},
}
_READS = {"numpy", "cpu", "item", "tolist"}
_REDUCTIONS = {"all", "any", "max", "min", "sum", "mean", "norm"}


def _forbidden_operation(call: ast.Call) -> str | None:
    """Return the operation by which a call uses a CUDA stream or reads a device tensor.

    Return None for all other calls.
    """
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    if name.startswith("streams."):  # the module `streams` may be called
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
    return [
        ast.unparse(call) for call in calls if _forbidden_operation(call) not in (None, *allowed)
    ]


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
