"""Tiny Echo checkpoint, with the components of LTX-2 except the scheduler; its test cases."""

from __future__ import annotations

from tests.support.families.ltx2 import ltx2_parts
from tests.support.family_case import Case, size
from tests.support.tiny_parts import Parts


def _echo(image: bool) -> Parts:
    parts = ltx2_parts(image)
    del parts["scheduler"]
    return parts


_SIZE = size(32, 32, 9, num_inference_steps=8)

PARTS = {"echo": _echo}
CASES = {
    "echo": Case(
        "echo",
        _SIZE,
        is_stateless=True,
        draws=True,
        refused=[
            ({"num_inference_steps": 4}, "must be 8, got 4: the model is distilled"),
            ({"guidance_scale": 3.0}, "`guidance_scale` must be 1.0, got 3.0 ... without guidance"),
        ],
    ),
    "echo-image": Case("echo", _SIZE, image=True, is_stateless=True, draws=True),
}
