"""Owns the upper limits of a plan: above them a plan takes too long to make or to draw."""

from __future__ import annotations

#: Denoising steps of one clip in a plan. What is run has a lower limit: `config.limits.MAX_STEPS`.
MAX_PLANNED_STEPS = 65_536
#: Ranks of a plan, and of a run.
MAX_RANKS = 65_536
