"""Owns the upper limits of a plan; a larger plan takes too long to compute or draw."""

from __future__ import annotations

#: Denoising steps of a clip in a plan. A run has the lower limit `config.limits.MAX_STEPS`.
MAX_PLANNED_STEPS = 65_536
#: Ranks of a plan and of a run.
MAX_RANKS = 65_536
