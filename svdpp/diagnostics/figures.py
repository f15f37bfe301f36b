"""Former names of `svdpp.diagnostics.run_metrics`."""

from svdpp.diagnostics.run_metrics import RunMetrics as RunFigures
from svdpp.diagnostics.run_metrics import collect_run_metrics as measured_figures

__all__ = ["RunFigures", "measured_figures"]
