"""The configuration of a run: frozen dataclasses that validate themselves.

Their `__post_init__` refuses what cannot run or exceeds `config.limits`, before any work.
"""

from svdpp.config.pipeline import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DEMO_SAMPLING,
    DUMMY_MODEL,
    ClipRequest,
    Dtype,
    LatentSpec,
    Lora,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    VideoFormat,
    sampling_defaults,
)
from svdpp.config.sampling import (
    DEFAULT_NUM_STEPS,
    SAMPLING_CLASSES,
    CommonSampling,
    Fit,
    LtxSampling,
    Param,
    PromptedSampling,
    SamplingConfig,
    SvdSampling,
    WanSampling,
    extra_params,
    params_of,
    sampling_from,
)
