"""Sizes of packets: how many latents a packet carries besides what the encode gives.

`pytest -s tests/models/test_packet_sizes.py` prints the bytes of each family's largest packet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from svdpp.models.base import LATENTS, STRUCTURE, Tensors
from tests.support.range_checks import TinyModel, source
from tests.support.tiny_families import CASES, FIRST, chosen

pytestmark = pytest.mark.usefixtures("one_thread")

#: Latents in a packet between two steps, besides what the encode gives, by family: the latent
#: itself, and what the comments name. Packets of all other families have only the latent itself.
_LATENTS = {
    # UniPC: the last two predictions, and the latent before the step.
    **dict.fromkeys(
        (
            *("wan", "wan_vace", "wan_vace_control", "wan_v2v", "wan_animate", "wan_replace"),
            *("wan_modular", "wan22_modular", "wan22_vace_modular", "wan22_vace_control_modular"),
            *("skyreels_v2", "skyreels_v2_df", "cosmos3", "cosmos3_sound", "cosmos3_v2v"),
        ),
        4.0,
    ),
    "skyreels_v2_df_v2v": 2.5,  # the same, but the frames of the video have no solver
    "sana_video": 3.0,  # DPM-Solver: the last two predictions
    **dict.fromkeys(("cogvideox", "cogvideox_v2v"), 2.0),  # DPM: the last prediction
    "ltx_condition": 2.0,  # the first noise, of which each step adds a part to the image
    **dict.fromkeys(("minimax_h3", "minimax_h3_references"), 2.0),  # a copy in the loop's state
    # Of the second of two chunks: its first noise, the finished chunk, the history (28 frames; a
    # chunk has 9), the 20 of these frames that the denoiser reads, and what the solver keeps.
    "helios": 9.44,
    "helios_v2v": 9.33,
    "helios_pyramid": 10.13,
    "helios_pyramid_v2v": 10.02,
    "helios_distilled": 6.82,
    "helios_distilled_v2v": 6.71,
}
#: The same of models in bf16, where it differs. A latent in fp32 counts as two.
_BF16_LATENTS = {
    "mochi": 3.0,  # the scheduler's result in fp32, which the pipeline makes a latent in bf16
    **dict.fromkeys(("cogvideox", "cogvideox_v2v"), 5.0),  # this result, and DPM's last prediction
    "helios_distilled": 12.22,  # what fp32 has, still in fp32, and the latent in bf16
    "helios_distilled_v2v": 12.1,
    "hunyuan_video": 0.5,  # the encode gives a latent in fp32, which the first step makes bf16
}
#: Sampling parameters of the larger clip, for families whose clips may not have twice the height.
_OTHER_SIZE = {"hunyuan_video_15": {"num_frames": 25}}


@dataclass(frozen=True)
class Sizes:
    """Bytes of the tensors of a packet that is sent between two steps."""

    latent: int
    """Bytes of the largest latent of the clip."""
    packet: int
    encode: int
    """Bytes of tensors that the encode gave, and that no step has changed."""
    rest: int
    """Bytes of all other tensors, with the latent, and without the structure."""

    @classmethod
    def of(cls, packets: list[Tensors]) -> Sizes:
        """Return the sizes of the packet with the most bytes that the encode did not give.

        Args:
            packets: Packets before the first step and after each step of a clip.
        """
        given = [tensor for name, tensor in packets[0].items() if name != LATENTS]
        latent = max(packet[LATENTS].nbytes for packet in packets)
        return max(
            (cls._of(packet, latent, given) for packet in packets[1:-1]), key=lambda each: each.rest
        )

    @classmethod
    def _of(cls, packet: Tensors, latent: int, given: Iterable[torch.Tensor]) -> Sizes:
        tensors = [tensor for name, tensor in packet.items() if name != STRUCTURE]
        encode = sum(each.nbytes for each in tensors if any(_is_same(each, one) for one in given))
        rest = sum(each.nbytes for each in tensors) - encode
        return cls(latent, sum(each.nbytes for each in packet.values()), encode, rest)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor, other)


@pytest.mark.parametrize(
    "dtype", ["fp32", pytest.param("bf16", marks=[pytest.mark.slow, pytest.mark.full])]
)
@pytest.mark.parametrize(
    "name", chosen(["wan"], ["ltx-condition", "sana-video", "cosmos3"], FIRST.values())
)
def test_a_packet_has_the_latent_the_solver_and_what_the_encode_gives(
    tiny_models: Callable[[str], TinyModel], name: str, dtype: Any
) -> None:
    """Clips of two sizes show which tensors grow with the latent. Tables and numbers do not."""
    tiny_model, case = tiny_models(name), CASES[name]
    model = replace(tiny_model.model, dtype=dtype)
    steps: dict[str, Any] = {"num_inference_steps": 4, **case.sampling}
    larger = _OTHER_SIZE.get(case.family, {"height": 2 * tiny_model.sampling.height})
    sizes = []
    for changes in (steps, {**steps, **larger}):
        sampling = tiny_model.checkpoint.resolve_sampling(case.config(**changes))
        images = source(sampling) if case.image else None
        clip = replace(tiny_model, model=model, sampling=sampling, source=images)
        sizes.append(Sizes.of(clip.packets(case.negative)))
    small, large = sizes
    growth = large.latent - small.latent
    latents = (large.rest - small.rest) / growth
    print(
        f"{case.family}: latent {large.latent}, packet {large.packet}, encode {large.encode} bytes;"
        f" {latents:.2f} latents, {(large.encode - small.encode) / growth:.2f} from the encode"
    )
    expected = _LATENTS | (_BF16_LATENTS if dtype == "bf16" else {})
    assert latents == pytest.approx(expected.get(case.family, 1.0), abs=0.01)
