"""Tiny Cosmos 3 checkpoints and their test cases."""

from __future__ import annotations

import diffusers

from tests.support.families.wan import WAN_UNIPC, wan_vae
from tests.support.family_case import Case, size
from tests.support.tiny_parts import Parts, qwen_tokenizer

_TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]


def _cosmos3(_: bool) -> Parts:
    return {
        "text_tokenizer": qwen_tokenizer(
            chat_template=_TEMPLATE, additional_special_tokens=_SPECIAL
        ),
        "vae": wan_vae(16),
        "scheduler": diffusers.UniPCMultistepScheduler(**WAN_UNIPC),
        "transformer": diffusers.Cosmos3OmniTransformer(
            **{"head_dim": 6, "hidden_act": "relu2", "hidden_size": 12, "intermediate_size": 12},
            **{"latent_channel": 16, "latent_patch_size": 1, "patch_latent_dim": 16},
            **{"num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1},
            **{"qk_norm_for_text": False, "rms_norm_eps": 1e-5, "rope_axes_dim": [1, 1, 1]},
            **{"sound_gen": True, "sound_dim": 4, "vocab_size": 512},
        ),
        "sound_tokenizer": diffusers.Cosmos3AVAEAudioTokenizer(
            **{
                "vocoder_input_dim": 4,
                "dec_dim": 4,
                "dec_c_mults": (1, 2),
                "dec_strides": (40, 48),
            },
            **{"enc_dim": 4, "enc_num_blocks": 1, "enc_n_fft": 8, "enc_hop_length": 2},
            **{"enc_latent_dim": 8, "enc_c_mults": (1,), "enc_strides": (2,)},
        ),
        "enable_safety_checker": False,
    }


_BLOCK = "block.denoiser_input_fields."
_UNREAD = {
    **dict.fromkeys(
        (
            "block.cond_vision_segment.vision_mrope_ids",
            f"{_BLOCK}uncond_vision_segment.vision_mrope_ids",
            f"{_BLOCK}cond_text_segment.text_mrope_ids",
            f"{_BLOCK}uncond_text_segment.text_mrope_ids",
        ),
        "the position ids, which travel, too, are made of these",
    ),
}

_UNREAD_WITH_SOUND = {
    **_UNREAD,
    **dict.fromkeys(
        (
            "block.cond_sound_segment.sound_mrope_ids",
            f"{_BLOCK}uncond_sound_segment.sound_mrope_ids",
        ),
        "the position ids, which travel, too, are made of these",
    ),
    **dict.fromkeys(
        (
            f"block.sound_scheduler.{name}"
            for name in ("betas", "alphas", "alphas_cumprod", "alpha_t", "sigma_t", "lambda_t")
        ),
        "the sound's scheduler travels as a whole, with tables that flow matching does not read",
    ),
}
_UNREAD_WITHOUT_GUIDANCE = {
    **_UNREAD,
    **dict.fromkeys(
        (
            f"{_BLOCK}uncond_{name}"
            for name in (
                *("text_segment.input_ids", "text_segment.text_indexes", "position_ids"),
                *(
                    "vision_segment.vision_sequence_indexes",
                    "vision_segment.vision_mse_loss_indexes",
                ),
                "vision_segment.vision_noisy_frame_indexes.0",
            )
        ),
        "the pipeline prepares an empty negative prompt, which no step reads",
    ),
}


def _distilled(image: bool) -> Parts:
    parts = _cosmos3(image)
    del parts["sound_tokenizer"]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0, stochastic_sampling=True)
    return {**parts, "scheduler": scheduler, "distilled_sigmas": [1.0, 0.9375, 0.8333, 0.625]}


PARTS = {"cosmos3": _cosmos3, "cosmos3_sound": _cosmos3, "cosmos3_distilled": _distilled}
CASES = {
    "cosmos3": Case("cosmos3", size(32, 32, 5), negative="blurred", unread=_UNREAD),
    "cosmos3-image": Case(
        "cosmos3",
        size(32, 32, 5),
        image=True,
        unread=_UNREAD,
        refused=[({"num_frames": 1}, "`num_frames` of a clip from an image must be more than 1")],
    ),
    "cosmos3-sound": Case(
        "cosmos3_sound", size(32, 32, 5), negative="blurred", unread=_UNREAD_WITH_SOUND
    ),
    "cosmos3-sound-image": Case(
        "cosmos3_sound", size(32, 32, 5), image=True, unread=_UNREAD_WITH_SOUND
    ),
    "cosmos3-distilled": Case(
        "cosmos3_distilled",
        size(32, 32, 5, num_inference_steps=4),
        draws=True,
        unread={
            **_UNREAD_WITHOUT_GUIDANCE,
            "block.vision_conditioning_latents": "only clips from an image read it",
        },
        refused=[
            ({"num_inference_steps": 8}, "must be 4, got 8: the model is distilled"),
            ({"guidance_scale": 3.0}, "`guidance_scale` must be 1.0, got 3.0 ... without guidance"),
        ],
    ),
    "cosmos3-image-distilled": Case(
        "cosmos3_distilled",
        size(32, 32, 5, num_inference_steps=4),
        image=True,
        draws=True,
        unread={
            **_UNREAD_WITHOUT_GUIDANCE,
            "latents": "steps read the latent with the image, its first frame",
        },
        refused=[({"num_frames": 1}, "`num_frames` of a clip from an image must be more than 1")],
    ),
    "cosmos3-video": Case(
        "cosmos3_v2v",
        size(32, 32, 9),
        image=True,
        unread=_UNREAD,
        refused=[
            ({"video_frames": 6}, "`video_frames` must be a multiple of 4 plus 1, got 6"),
            ({"num_frames": 5}, "`num_frames` must be above `video_frames` 5, got 5"),
        ],
    ),
}
