"""Measure a rank's overhead if a modular pipeline is cut into ranges of steps, one for each rank.

    python -m benchmarks.modular_cuts          all of the families below
    python -m benchmarks.modular_cuts helios   one of them

The denoisers are wide enough that a step takes about a second on one CPU core. The benchmark
divides the CPU time of a range of steps into three parts: before the first step (reading the
packet, hooks, skipped blocks, and phantom steps, which stand in for earlier steps without a forward
pass of the denoiser), the steps, and after the last step (making the next packet).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.options import parser_of
from svdpp.models.base import Tensors
from svdpp.models.engine.modular_call import ModularCall
from tests.support.range_checks import TinyModel, model_of, read_folder
from tests.support.tiny_families import CASES, FIRST, save_tiny

_WIDE = {"num_attention_heads": 8, "attention_head_dim": 96, "num_layers": 12, "ffn_dim": 3072}
_COSMOS = {
    **{"head_dim": 96, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "rope_axes_dim": [16, 16, 16]},
}
#: Config of the denoiser and sampling parameters, by family. Helios makes the clip in two chunks,
#: each with half of the steps.
_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wan_modular": (
        _WIDE,
        {"height": 128, "width": 128, "num_frames": 17, "num_inference_steps": 8},
    ),
    "helios": (
        {**_WIDE, "rope_dim": (32, 32, 32)},
        {"height": 64, "width": 64, "num_frames": 65, "num_inference_steps": 16},
    ),
    "cosmos3": (
        _COSMOS,
        {"height": 64, "width": 64, "num_frames": 17, "num_inference_steps": 8},
    ),
}


class Seconds(NamedTuple):
    """CPU seconds of one call that runs a range of steps."""

    before: float
    """Seconds before the first call of the denoiser for a step of the range, not a phantom step."""
    whole: float
    """Seconds of the whole call, with `before` and `after`."""
    after: float
    """Seconds after the last step."""


def measure(tiny_model: TinyModel, packet: Tensors, start: int, end: int) -> Seconds:
    """Run a range of a modular pipeline's steps; return the CPU time of its parts.

    Args:
        tiny_model: Model and clip.
        packet: Packet before the step `start`.
        start: First step.
        end: Step after the last one.
    """
    rank, evaluate = tiny_model.rank_for(start, end), ModularCall.evaluate
    first: list[float] = []
    last: list[float] = []

    def watched(call: ModularCall, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (first or call._phantom_steps):
            first.append(time.thread_time())
        return evaluate(call, real, *args, **kwargs)

    with patch.object(ModularCall, "evaluate", watched):
        begun = time.thread_time()
        rank.denoise(packet, start, end, lambda *_: last.append(time.thread_time()))
        ended = time.thread_time()
    return Seconds(first[0] - begun, ended - begun, ended - last[-1])


def measure_family(family: str) -> None:
    """Measure several ranges of steps of a family's clip, and print a line for each."""
    denoiser, changes = _SETTINGS[family]
    case = CASES[FIRST[family]]
    with tempfile.TemporaryDirectory() as folder:
        configs = {"transformer": denoiser}
        checkpoint = read_folder(save_tiny(family, Path(folder), configs=configs), family)
        sampling = checkpoint.resolve_sampling(case.config(**changes))
        tiny_model = TinyModel(checkpoint, sampling, model_of(checkpoint), None)
        packets, steps = tiny_model.packets(), tiny_model.steps
        for start, end in ((steps // 2, steps), (steps * 5 // 8, steps), (steps - 1, steps)):
            runs = [measure(tiny_model, packets[start], start, end) for _ in range(2)]
            took = min(runs, key=lambda run: run.whole)
            print(
                f"{family}, steps {start} to {end} of {steps}: {took.whole:.2f} s, "
                f"{1000 * took.before:.1f} ms before them ({took.before / took.whole:.2%}), "
                f"{1000 * took.after:.1f} ms after them ({took.after / took.whole:.2%})"
            )


def main() -> None:
    """Measure ranges of steps of the modular family on the command line, or of all families."""
    parser = parser_of(__doc__)
    parser.add_argument("family", nargs="?", choices=_SETTINGS)
    torch.set_num_threads(1)
    chosen = parser.parse_args().family
    for family in _SETTINGS if chosen is None else [chosen]:
        measure_family(family)


if __name__ == "__main__":
    main()
