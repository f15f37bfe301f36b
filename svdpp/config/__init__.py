"""The configuration of a run: frozen dataclasses that validate themselves.

Options, benchmark YAML, clip metadata and the Python API all create these dataclasses. Their
`__post_init__` refuses what cannot run or exceeds `config.limits`, before any work.
"""

from svdpp.config.clip import ClipRequest, OutputConfig, VideoFormat
from svdpp.config.families import (
    SAMPLING_CLASSES,
    LtxSampling,
    SamplingConfig,
    WanSampling,
    sampling_from,
)
from svdpp.config.pipeline import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DEMO_SAMPLING,
    DUMMY_MODEL,
    Dtype,
    LatentSpec,
    Lora,
    ModelConfig,
    PipelineConfig,
    sampling_defaults,
)
from svdpp.config.sampling import (
    DEFAULT_NUM_STEPS,
    CommonSampling,
    Fit,
    Param,
    PromptedSampling,
    SvdSampling,
    own_params,
    params_of,
)
