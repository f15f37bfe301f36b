"""SVD's noise levels, so that a plan can show them without a scheduler."""

from __future__ import annotations

# stabilityai/stable-video-diffusion-img2vid-xt, scheduler/scheduler_config.json
SIGMA_MIN = 0.002
SIGMA_MAX = 700.0
# Karras et al. 2022 (arXiv:2206.00364), eq. 5; diffusers' Euler scheduler uses the same value
RHO = 7.0


def karras_sigmas(num_steps: int) -> list[float]:
    """Noise level before each step, then 0: `num_steps + 1` decreasing values.

    The formula of EDM (arXiv:2206.00364, eq. 5) with SVD's range, as
    `EulerDiscreteScheduler.set_timesteps` computes it for `use_karras_sigmas`.
    """
    high, low = SIGMA_MAX ** (1 / RHO), SIGMA_MIN ** (1 / RHO)
    span = max(num_steps - 1, 1)
    return [(high + step / span * (low - high)) ** RHO for step in range(num_steps)] + [0.0]
