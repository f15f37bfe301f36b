from svdpp.config import ClipRequest as ClipRequest
from svdpp.config import LatentSpec as LatentSpec
from svdpp.config import Lora as Lora
from svdpp.config import LtxSampling as LtxSampling
from svdpp.config import ModelConfig as ModelConfig
from svdpp.config import OutputConfig as OutputConfig
from svdpp.config import PipelineConfig as PipelineConfig
from svdpp.config import SvdSampling as SvdSampling
from svdpp.config import WanSampling as WanSampling
from svdpp.driver.clips import ClipFailure as ClipFailure
from svdpp.driver.clips import ClipHandle as ClipHandle
from svdpp.driver.clips import ClipResult as ClipResult
from svdpp.driver.pipeline import Pipeline as Pipeline
from svdpp.errors import SvdppError as SvdppError
from svdpp.plan.split import StepRange as StepRange
from svdpp.verification.result import VerificationResult as VerificationResult
from svdpp.verification.verify import verify as verify
from svdpp.worker.stage import PipelineStage as PipelineStage

__version__: str
