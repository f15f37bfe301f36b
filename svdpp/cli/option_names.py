"""Names of options by the configuration field that each sets, so that messages can name options.

Errors are raised about fields of configurations, such as `num_frames`. Users of the command line
know only the options, such as `--frames`.
"""

from __future__ import annotations

from functools import cache

#: Options whose names differ from the names of their fields in configurations, by field.
OPTION_OF_FIELD = {
    "world_size": "gpus",
    "num_threads": "threads",
    "timeout_seconds": "timeout",
    "start_timeout_seconds": "start-timeout",
    "num_inference_steps": "steps",
    "num_frames": "frames",
    "max_sequence_length": "max-prompt-tokens",
    "loras": "lora",
    "references": "reference",
    "denoisers": "denoiser",
    "dummy_latent_shape": "latent-shape",
}
#: Options that are not fields of a configuration, but that errors may name.
_FIELDS_OF_OPTIONS = (
    *("layout", "hosts", "clips", "prompts", "video", "max_megapixels", "peak_tflops", "debug"),
    *("out", "name", "overwrite", "resume", "latents_dir", "grace", "lease"),
    *("jobs", "seeds", "format", "crf", "server", "server_timeout"),
    *(
        "data",
        "lora_dir",
        "queue",
        "files",
        "adopt",
        "host",
        "api_key_file",
        "new_key",
        "callback_hosts",
    ),
)


@cache
def option_names() -> dict[str, str]:
    """Map each field that errors name to its option, such as `num_frames` to `--frames`."""
    from svdpp.config import SAMPLING_CLASSES, configuration_fields

    own = {name for kind in SAMPLING_CLASSES.values() for name in kind.own}
    return {
        name: f"--param {name}"
        if name in own
        else f"--{OPTION_OF_FIELD.get(name, name).replace('_', '-')}"
        for name in (*configuration_fields(), *_FIELDS_OF_OPTIONS)
    }
