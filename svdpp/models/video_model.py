"""`VideoModel`: type of the model that a rank runs, either real or dummy."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # importing diffusers takes seconds, and the dummy model does not need it
    from svdpp.models.dummy import DummyModel
    from svdpp.models.engine.model import EngineModel

#: Model of one rank, with the components for the rank's roles, on the rank's device.
VideoModel: TypeAlias = "EngineModel | DummyModel"
