"""Choice of a family's model class, and loading of the model of one rank."""

from __future__ import annotations

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.config.families.spec import FamilySpec
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.attention import use_attention_backend
from svdpp.models.engine.load import load_pipeline
from svdpp.models.engine.loras import PipelineLoras
from svdpp.models.engine.model import EngineModel
from svdpp.models.engine.modular_model import ModularModel
from svdpp.plan.roles import Roles


def model_class(spec: FamilySpec) -> type[EngineModel]:
    """Return the class that runs the models of a family on a rank."""
    return EngineModel if spec.modular is None else ModularModel


def load_engine_model(
    checkpoint: Checkpoint, model: ModelConfig, sampling: SamplingConfig, device: str, roles: Roles
) -> EngineModel:
    """Load the components that one rank needs, and return the rank's model.

    Args:
        checkpoint: Checked checkpoint, with weights.
        model: Configuration of the checkpoint's model, such as its dtype and attention backend.
        sampling: Resolved sampling parameters.
        device: Device of the rank, such as `cuda:1`.
        roles: Roles of the rank.

    Raises:
        ModelError: Files are missing, or do not fit together.
        OutOfMemoryError: A component does not fit on the device.
    """
    pipe = load_pipeline(checkpoint, model, sampling=sampling, roles=roles, device=device)
    if model.attention_backend is not None:
        use_attention_backend(pipe, model.attention_backend)
    loras = PipelineLoras(pipe, checkpoint, local_files_only=model.local_files_only)
    return model_class(checkpoint.spec)(pipe, checkpoint, sampling, model.dtype, loras)
