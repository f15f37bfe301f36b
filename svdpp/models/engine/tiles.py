"""Tiled decode of a VAE on several ranks, each of which decodes some of the tiles.

diffusers' `tiled_decode` calls the VAE's decoder for each tile, and then blends all tiles. No tile
depends on another tile. Ranks that share a decode run this method unmodified, and replace only the
decoder's `forward`. For example, two ranks decode four tiles:

    both ranks                    `forward` decodes and stores the rank's own tiles (0 and 1, or 2
                                  and 3). It always returns an empty tensor, so the blending has no
                                  effect
    then the rank that finishes   `forward` returns the four stored tiles one after the other, and
                                  computes nothing. The blending makes the frames

So the order of the tiles, their overlap and the blending are diffusers' own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from svdpp.config import SamplingConfig
from svdpp.models.base import TILE, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine import load
from svdpp.models.engine.records import patch_methods
from svdpp.plan.actions import DecodeRange


class TileShape(NamedTuple):
    """Shape of the part of a latent from which one tile is decoded."""

    frames: int
    height: int
    width: int

    @property
    def positions(self) -> int:
        """Number of latent positions from which a VAE's tile is decoded."""
        return self.frames * self.height * self.width


class PartDecoder:
    """Replacement of a VAE decoder's `forward` that decodes only the tiles of one rank.

    Args:
        decode: Function that decodes a tile: the decoder's own `forward`.
        part: Tiles that this rank decodes, as a range of latent positions. The count of positions
            goes on from one tile to the next: in a clip with tiles of 100 positions each, the range
            100 to 300 means the second and the third tile.
    """

    def __init__(self, decode: Callable[..., torch.Tensor], part: DecodeRange) -> None:
        self._decode, self._part = decode, part
        self._calls = _TileCalls()
        self._pieces: dict[int, list[torch.Tensor]] = {}
        self.shapes: list[TileShape] = []
        """Shapes of the tiles seen so far, including tiles that this rank does not decode."""

    def __call__(self, latent: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Decode a tile's latent, (B, C, F, H, W), and store the result, if this rank has the tile.

        Returns:
            Empty tensor in place of the frames. diffusers can blend and concatenate it.
        """
        frames, height, width = latent.shape[2:]
        if self._calls.begins_tile(kwargs):
            first = sum(shape.positions for shape in self.shapes)
            if self._part.first <= first < self._part.end:
                self._pieces[len(self.shapes)] = []
            self.shapes.append(TileShape(0, height, width))
        index = len(self.shapes) - 1
        shape = self.shapes[index]
        self.shapes[index] = shape._replace(frames=shape.frames + frames)
        if index in self._pieces:
            self._pieces[index].append(self._decode(latent, *args, **kwargs))
        return latent.new_empty(len(latent), 0, 0, 0, 0)

    @property
    def tiles(self) -> Tensors:
        """Tiles that this rank has decoded, (B, C, F, H, W) each, by `tile_name`."""
        pieces = self._pieces.items()
        return {tile_name(index): torch.cat(each, dim=2) for index, each in pieces}


class TilePlayer:
    """Replacement of a VAE decoder's `forward` that returns tiles that are already decoded.

    Args:
        tiles: All tiles of the clip, by `tile_name`.
    """

    def __init__(self, tiles: Mapping[str, torch.Tensor]) -> None:
        self._tiles, self._calls, self._count = tiles, _TileCalls(), 0

    def __call__(self, *_: Any, **kwargs: Any) -> torch.Tensor:
        """Return a clip's next decoded tile, or no frames in further calls for the same tile.

        Wan calls its decoder once for each frame of a tile's latent, and concatenates the results.
        So the first call returns all frames of the tile.
        """
        if self._calls.begins_tile(kwargs):
            self._count += 1
            return self._tiles[tile_name(self._count - 1)]
        return self._tiles[tile_name(self._count - 1)][:, :, :0]


def tile_name(index: int) -> str:
    """Return the tensor name under which one rank sends a decoded tile to another."""
    return f"{TILE}.{index}"


class _TileCalls:
    """Detector of the first call of a VAE's decoder for each tile.

    Wan's decoder is called once for each frame of a tile's latent, and gets a new cache with each
    tile. Other decoders are called once for each tile, without a cache.
    """

    def __init__(self) -> None:
        self._cache: Any = None

    def begins_tile(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the VAE decoder's next call is the first call for a tile.

        Call this method exactly once before each call of the decoder, because it compares the cache
        with that of the previous call.

        Args:
            kwargs: Keyword arguments of the decoder's next call.
        """
        before, self._cache = self._cache, kwargs.get("feat_cache")
        return self._cache is None or self._cache is not before


def tile_specs(
    shapes: list[TileShape], part: DecodeRange, first_tile: torch.Tensor
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the tiles that another rank decodes, by tile name.

    The shapes are computed from the first decoded tile: the decode enlarges the height and width of
    all tiles by the same factors, and no tile has more frames than the first one.

    Args:
        shapes: Shapes of the latents of all tiles of the clip.
        part: Tiles that the other rank decodes, as a range of latent positions. The count of
            positions goes on from one tile to the next: in a clip with tiles of 100 positions each,
            the range 100 to 300 means the second and the third tile.
        first_tile: First decoded tile of the clip.
    """
    batch, channels, frames, height, width = first_tile.shape
    first = shapes[0]
    later_frames = (frames - 1) // (first.frames - 1) if first.frames > 1 else 0
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    done = 0
    for index, shape in enumerate(shapes):
        if part.first <= done < part.end:
            size = (
                frames - later_frames * (first.frames - shape.frames),
                height // first.height * shape.height,
                width // first.width * shape.width,
            )
            specs[tile_name(index)] = (batch, channels, *size), first_tile.dtype
        done += shape.positions
    return specs


def tile_sizes(checkpoint: Checkpoint, sampling: SamplingConfig) -> tuple[int, ...]:
    """Return the number of latent positions in each tile of a clip's decode, in order.

    Args:
        checkpoint: Checkpoint of the model. Only its configs are read.
        sampling: Resolved sampling parameters.
    """
    return _tile_sizes(checkpoint, sampling.frames, sampling.height, sampling.width)


@functools.lru_cache(64)
def _tile_sizes(
    checkpoint: Checkpoint, num_frames: int, height: int, width: int
) -> tuple[int, ...]:
    vae = _vae_without_weights(checkpoint)
    config = vae.config
    side = vae.spatial_compression_ratio
    every = getattr(vae, "temporal_compression_ratio", None) or config.scale_factor_temporal
    channels = config["z_dim"] if "z_dim" in config else config["latent_channels"]
    size = (num_frames - 1) // every + 1, height // side, width // side
    nothing = DecodeRange(0, 0, 1)
    decoder = PartDecoder(vae.decoder.forward, nothing)
    with patch_methods(vae.decoder, forward=decoder), torch.no_grad():
        vae.decode(torch.empty(1, channels, *size, device="meta"))
    return tuple(shape.positions for shape in decoder.shapes)


@functools.lru_cache(4)
def _vae_without_weights(checkpoint: Checkpoint) -> Any:
    load.silence_libraries()
    vae = load.build_without_weights(checkpoint, "vae")
    vae.enable_tiling()
    return vae
