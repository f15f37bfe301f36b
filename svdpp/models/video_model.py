"""Model of a rank, real or dummy."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # importing diffusers takes seconds, and the dummy model does not need it
    from svdpp.models.dummy import DummyModel
    from svdpp.models.engine.model import EngineModel

#: The model of one rank: the components that its actions need, on its device.
VideoModel: TypeAlias = "EngineModel | DummyModel"
