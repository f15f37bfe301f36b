"""Owns what the user asked for: frozen values that check themselves. Stdlib and `plan` only.

This is the one model of a request. Options, a bench's YAML, a clip's JSON and Python all end in
these dataclasses, whose `__post_init__` refuses what cannot be run or lies beyond the limits in
`config.limits`, before anything is computed. Devices and dtypes are strings here; `models` and
`launch` make torch objects of them.
"""

from svdpp.config.clip import ClipRequest, OutputConfig, VideoFormat
from svdpp.config.model import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DTYPE_BYTES,
    DUMMY_MODEL,
    Dtype,
    LatentSpec,
    ModelConfig,
    TensorSpec,
)
from svdpp.config.pipeline import DraftConfig, PipelineConfig
from svdpp.config.sampling import (
    DEFAULT_NUM_STEPS,
    DEMO_SAMPLING,
    Fit,
    SamplingConfig,
    sampling_defaults,
)

__all__ = [
    "DEFAULT_MODEL",
    "DEFAULT_NUM_STEPS",
    "DEMO_MODEL",
    "DEMO_SAMPLING",
    "DTYPE_BYTES",
    "DUMMY_MODEL",
    "ClipRequest",
    "DraftConfig",
    "Dtype",
    "Fit",
    "LatentSpec",
    "ModelConfig",
    "OutputConfig",
    "PipelineConfig",
    "SamplingConfig",
    "TensorSpec",
    "VideoFormat",
    "sampling_defaults",
]
