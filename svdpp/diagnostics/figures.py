"""Former import path of `svdpp.diagnostics.run_metrics`, with the former names of its objects."""

from svdpp.diagnostics.run_metrics import RunMetrics as RunFigures
from svdpp.diagnostics.run_metrics import collect_run_metrics as measured_figures

__all__ = ["RunFigures", "measured_figures"]
