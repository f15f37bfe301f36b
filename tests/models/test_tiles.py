"""VAE tiling: the bits of diffusers with tiling, also if ranks share the decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from svdpp.config import ModelConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.errors import ModelError, RequestError
from svdpp.models.base import Tensors
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.tiles import tile_sizes
from svdpp.plan.layout import divide_chunks
from tests.models.test_registry import TinyModels
from tests.support.range_checks import TinyModel, check_every_cut, nothing, whole_clip
from tests.support.tiny_families import CASES, chosen

pytestmark = pytest.mark.usefixtures("one_thread")

#: By case: sizes of a clip that needs more than one tile of its VAE.
TILED: dict[str, dict[str, int]] = {
    "wan": {"height": 16, "width": 288},
    "wan-image-bf16": {"height": 16, "width": 288},
    "wan-5b-unguided": {"height": 32, "width": 288},
    "skyreels-v2": {"height": 16, "width": 288},
    "ltx": {"height": 32, "width": 544},
    "ltx-condition-image": {"height": 32, "width": 544},
    "ltx2": {"height": 32, "width": 544},
    "hunyuan-video": {"height": 16, "width": 288, "num_frames": 33},
    "hunyuan-video-1.5": {"height": 16, "width": 288},
    "kandinsky5": {"height": 16, "width": 288},
    "kandinsky6": {"height": 16, "width": 288},
    "sana-video": {"height": 32, "width": 288},
    "cogvideox": {"height": 16, "width": 400},
    "mochi": {"height": 16, "width": 288},
    "latte": {"height": 16, "width": 288},
}


#: Cases that CI tests in addition to Wan and LTX-Video. The remaining cases take more time.
IN_CI = ("sana-video", "cogvideox")


def tiled(tiny_models: TinyModels, name: str) -> TinyModel:
    """Return the tiny model of a test case with VAE tiling, for a clip of several tiles."""
    tiny_model = tiny_models(name)
    sizes: dict[str, Any] = {**TILED[name], "num_inference_steps": 2}
    return replace(
        tiny_model,
        model=replace(tiny_model.model, vae_tiling=True),
        sampling=replace(tiny_model.sampling, **sizes),
    )


@pytest.mark.parametrize("name", chosen(("wan", "ltx"), IN_CI, TILED))
def test_a_clip_in_tiles_has_the_bits_of_diffusers_with_tiles(
    tiny_models: TinyModels, name: str
) -> None:
    tiny_model = tiled(tiny_models, name)
    clip = tiny_model.sampling, tiny_model.request(), tiny_model.source
    reference = whole_clip(tiny_model.model, *clip)
    check_every_cut(tiny_model.rank_for, tiny_model.steps, reference, *clip[1:])
    whole = whole_clip(replace(tiny_model.model, vae_tiling=False), *clip)
    assert not np.array_equal(reference[1], whole[1]), "the clip has one tile"


SHARED = [name for name in TILED if FAMILY_SPECS[CASES[name].family].decodes_in_tiles]


def finished(tiny_model: TinyModel) -> Tensors:
    packet = tiny_model.encode(tiny_model.request())
    for step in range(tiny_model.steps):
        packet = tiny_model.rank_for(step, step + 1).denoise(packet, step, step + 1, nothing)
    return packet


@pytest.mark.parametrize("name", chosen(("wan", "ltx"), IN_CI, SHARED))
def test_tiles_of_several_ranks_are_blended_to_the_frames_of_one(
    tiny_models: TinyModels, name: str
) -> None:
    tiny_model = tiled(tiny_models, name)
    packet, model = finished(tiny_model), tiny_model.decoder
    whole, sound = model.decode(packet), model.audio
    sizes = tile_sizes(tiny_model.checkpoint, tiny_model.sampling)
    assert len(sizes) > 1
    for count in {2, len(sizes)}:
        ranges = divide_chunks(sizes, count)
        parts = [model.decode_part(packet, each) for each in ranges]
        assert sum(map(len, parts)) == len(sizes)
        for part, each in zip(parts, ranges, strict=True):
            found = {name: (tuple(tile.shape), tile.dtype) for name, tile in part.items()}
            assert model.part_specs(parts[0], each) == found
        copies = [{name: tile.clone() for name, tile in part.items()} for part in parts]
        assert torch.equal(model.join_parts(packet, parts), whole)
        if sound is not None:
            assert model.audio is not None
            assert torch.equal(model.audio.samples, sound.samples)
    tiles = {name: tile for part in copies for name, tile in part.items()}
    tiles["tile.1"] = tiles["tile.1"].flip(-1)
    assert not torch.equal(model.join_parts(packet, [tiles]), whole)


def test_other_tiles_than_planned_are_refused(tiny_models: TinyModels) -> None:
    tiny_model = tiled(tiny_models, "wan")
    part = divide_chunks(tile_sizes(tiny_model.checkpoint, tiny_model.sampling), 2)[0]
    with pytest.raises(ModelError, match=r"176 latent positions in all, but 177 were") as caught:
        tiny_model.decoder.decode_part(finished(tiny_model), part._replace(total=part.total + 1))
    assert caught.value.details == {"positions": 176, "planned": 177}


def test_a_vae_that_diffusers_cannot_tile_is_refused(tiny_models: TinyModels) -> None:
    model = replace(tiny_models("svd").model, vae_tiling=True)
    with pytest.raises(RequestError, match="no tiling for AutoencoderKLTemporalDecoder") as caught:
        find_checkpoint(model)
    assert "`decode_chunk_size`" in caught.value.hint
    with pytest.raises(RequestError, match="the dummy model takes no `vae_tiling`"):
        ModelConfig(name="dummy", vae_tiling=True)
