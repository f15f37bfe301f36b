"""Latent checkpoints from before packets described themselves: svdpp 0.3. Those of SVD are read."""

from __future__ import annotations

from typing import Any

import torch

from svdpp.config import SamplingConfig
from svdpp.errors import InputError
from svdpp.models.base import GENERATOR, LATENTS, STRUCTURE, Tensors


def upgraded(tensors: Tensors, sampling: SamplingConfig, steps: int) -> Tensors:
    """The tensors of a checkpoint after `steps` as a packet of this version has them."""
    if STRUCTURE in tensors or tensors.keys() == {LATENTS}:  # the second are the dummy's
        return tensors
    if sampling.family != "svd":
        raise InputError(
            "the latent checkpoint was written by svdpp 0.3 or earlier, which kept less of a clip",
            "delete it: the clip then starts again",
        )
    return _of_svd(tensors, sampling, steps)


def _of_svd(tensors: Tensors, sampling: Any, steps: int) -> Tensors:
    """The results that SVD's call replays; 0.3 kept them without their unconditional halves."""
    from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteSchedulerOutput

    from svdpp.models.engine.values import Packer, describe

    def both(tensor: torch.Tensor, *, same: bool = False) -> torch.Tensor:
        other = tensor if same else torch.zeros_like(tensor)
        return torch.cat([other, tensor]) if sampling.guided else tensor

    packer, latents = Packer(), tensors[LATENTS]
    packed = packer.pack(latents, LATENTS)
    pixels = torch.empty(1, 3, sampling.height, sampling.width, device="meta")
    embedding, ids = both(tensors["image_embedding"]), both(tensors["added_time_ids"], same=True)
    results = {
        "_encode_image": packer.pack(embedding, "record.0"),
        "video_processor.preprocess": describe(pixels),
        "_encode_vae_image": packer.pack(both(tensors["image_latents"]), "record.2"),
        "_get_add_time_ids": packer.pack(ids, "record.3"),
        "prepare_latents": describe(latents) if steps else packed,
    }
    result = EulerDiscreteSchedulerOutput(prev_sample=latents, pred_original_sample=None)
    step = {
        "latents": packed,
        "chunks": [[[describe(result)]]],
        "states": [{"kind": "dict", "items": {"_step_index": {"kind": "plain", "value": steps}}}],
        "outputs": [describe((both(latents),))],
        "generators": packer.pack([torch.Generator().get_state()], GENERATOR),
    }
    records = [{"name": name, "result": each, "drew": None} for name, each in results.items()]
    structure = {"records": records, "step": step if steps else None}
    return packer.packet({**structure, "given": {"negative_prompt": False}})
