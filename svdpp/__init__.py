"""svdpp: video diffusion over several devices by splitting the denoising steps.

The public names are imported when they are first used, so that `import svdpp` and light commands do
not import torch. The types of the public names are in `__init__.pyi`.
"""

import importlib
from typing import Any

__version__ = "0.3.0"

_MODULES = {
    "svdpp.config": (
        *("ClipRequest", "Denoiser", "LatentSpec", "Lora", "ModelConfig", "OutputConfig"),
        *("LtxSampling", "ParallelConfig", "PipelineConfig", "SvdSampling", "WanSampling"),
    ),
    "svdpp.driver.clips": ("ClipFailure", "ClipHandle", "ClipResult"),
    "svdpp.driver.generate": ("generate",),
    "svdpp.driver.pipeline": ("Pipeline",),
    "svdpp.errors": (
        *("BrokenLinkError", "ClosedError", "DeviceError", "InputError", "MismatchError"),
        *("ModelError", "NotFiniteError", "OutOfMemoryError", "OutputError", "RankError"),
        *("RequestError", "ServerError", "SvdppError", "TargetMissedError", "TransportError"),
        "VerificationError",
    ),
    "svdpp.plan.split": ("StepRange",),
    "svdpp.verification.result": ("VerificationResult",),
    "svdpp.verification.verify": ("verify",),
    "svdpp.worker.stage": ("PipelineStage",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
