"""Configuration of a run: frozen dataclasses that validate themselves.

Each class checks its values in `__post_init__`: it rejects values that cannot run, and values above
a limit of `config.limits`.
"""

from svdpp.config.added_files import AddedFile, Denoiser, parse_denoiser
from svdpp.config.demo_models import DEMO_MODELS
from svdpp.config.families.ltx import LtxSampling
from svdpp.config.families.registry import (
    OPTION_PARAMS,
    SAMPLING_CLASSES,
    SamplingConfig,
    sampling_from,
)
from svdpp.config.families.svd import SvdSampling
from svdpp.config.families.wan import WanSampling
from svdpp.config.loras import Lora, parse_loras
from svdpp.config.pipeline import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DUMMY_MODEL,
    ClipRequest,
    Dtype,
    Encoding,
    LatentSpec,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    VideoFormat,
    configuration_fields,
    is_built_in,
    sampling_defaults,
    sampling_of_model,
)
from svdpp.config.sampling import (
    DEFAULT_NUM_STEPS,
    CommonSampling,
    Fit,
    Param,
    PromptedSampling,
    extra_params,
    params_of,
)
from svdpp.plan.parallel import ParallelConfig
