"""`svdpp serve`: the HTTP service."""

from __future__ import annotations

import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from svdpp.cli.command import command
from svdpp.cli.console import Console, counted
from svdpp.cli.options.files import LogOptions
from svdpp.cli.options.pipeline import PipelineRequest
from svdpp.cli.options.serve import ServeOptions
from svdpp.errors import Interrupted, RequestError
from svdpp.launch.world import World, is_member

if TYPE_CHECKING:
    from svdpp.config import PipelineConfig
    from svdpp.serve.auth import Keys
    from svdpp.serve.service import ServerSettings

#: What the extra `serve` installs, by the names of its modules.
_EXTRA = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
#: What the extra `fleet` installs.
_FLEET = ("psycopg", "fsspec", "s3fs")
# A queue has no end; the choice of a layout needs a number.
_MANY_CLIPS = 1000


@command(
    examples=(
        "svdpp serve --gpus 7 --data clips",
        "svdpp serve --device cpu --model demo",
        "svdpp serve --new-key alice --api-key-file keys.txt",
    ),
    without=("seed",),
    defaults={
        "world": "all GPUs; on the CPU 2",
        "split": "alternating; with two experts balanced",
    },
    meanings={
        "steps": "Denoising steps of a clip, unless its request says otherwise.",
        "num_frames": "Frames of a clip, unless its request says otherwise.",
        "start_timeout": "Start the ranks again if they are not ready after this long.",
        "timeout": "Start the ranks again if one makes no progress for this long.",
    },
)
def serve(
    console: Console,
    launched: World | None,
    options: ServeOptions,
    log: LogOptions,
) -> None:
    """Serve clips over HTTP, with a queue that survives crashes and a web page.

    The first SIGTERM or Ctrl-C takes no more requests and finishes the clips in progress; what is
    left goes on at the next start. The second one ends at once.
    """
    if options.new_key is not None:
        _create_key(console, options.new_key, options.api_key_file)
        return
    from svdpp.cli.progress import serve_member
    from svdpp.driver.pipeline import Pipeline
    from svdpp.serve.auth import check_host

    sizes = options.all_sizes()
    _check_extra("serve", _EXTRA)
    if options.queue is not None:
        _check_extra("fleet", _FLEET)
    keys = None if is_member(launched) else check_host(options.host, options.api_key_file)
    try:
        if is_member(launched):
            config, _ = _config(options, launched)
            log.open(console, launched, warns=True)
            pipeline = Pipeline(
                config,
                latents_folder=str(options.data.absolute() / "latents"),
                history_clips=1,
                ranks_ignore_signals=True,
            )
            serve_member(pipeline, launched, console)
        else:
            _serve(console, options, keys, sizes, launched, log)
    except Interrupted:
        console.info("ended before it served")


def _serve(
    console: Console,
    asked: ServeOptions,
    keys: Keys | None,
    sizes: tuple[tuple[int, int], ...],
    launched: World | None,
    log: LogOptions,
) -> None:
    """Checks the request, the quick checks first, and serves until a signal."""
    from svdpp.cli.progress import EventLog
    from svdpp.launch import fork_server
    from svdpp.serve.server import Server, build

    with _bind(asked.host, asked.port) as bound:
        config, why = _config(asked, launched)
        if launched is None:
            family = None if asked.is_dummy else asked.family
            fork_server.start_early(family=family, device=config.device)
        log.open(console, launched, warns=True)
        console.info(why)
        settings = _settings(asked, sizes, config)
        app, service = build(settings, keys)
        service.engine.observe(EventLog(settings.config.layout, service.engine.name_of))
        server = Server(
            app,
            service,
            bound,
            grace_seconds=asked.grace,
            on_listening=lambda: _announce(console, asked, settings.config, bound, keys),
            on_ready=lambda: console.info("ready to make clips"),
        )
        server.run()
    console.info("ended; the next start goes on with what is left")


def _config(asked: ServeOptions, launched: World | None) -> tuple[PipelineConfig, str]:
    return PipelineRequest(
        options=asked,
        num_clips=None if launched else _MANY_CLIPS,
        launched=launched,
        # Ranks for clips from images also make clips from text, if the model allows both.
        from_image=asked.image_use != "refused",
        serves=True,
        time_scale=asked.time_scale,
    ).resolve(heartbeat_timeout_seconds=asked.heartbeat_timeout)


def _settings(
    asked: ServeOptions, sizes: tuple[tuple[int, int], ...], config: PipelineConfig
) -> ServerSettings:
    from svdpp.config.limits import find_costs
    from svdpp.serve.guard import Limits
    from svdpp.serve.server import check_config
    from svdpp.serve.service import ServerSettings

    config = check_config(config, sizes)
    asked.check_own(config.sampling)
    return ServerSettings(
        config=config,
        folder=asked.data,
        sizes=sizes,
        max_open=asked.max_queue,
        max_steps=asked.max_steps,
        max_frames=asked.max_frames,
        limits=Limits(upload_bytes=asked.max_upload_mb * 2**20),
        max_pixels=asked.max_pixels,
        keep_seconds=None if asked.keep_days is None else asked.keep_days * 86400,
        keep_bytes=None if asked.keep_gb is None else int(asked.keep_gb * 1e9),
        verifies_when_idle=asked.verify_when_idle,
        costs=None if asked.costs is None else find_costs(asked.costs),
        adopts=asked.adopt,
        callback_hosts=asked.callback_hosts or (),
        callback_secrets=_secrets(asked),
        queue_url=asked.queue,
        store_url=asked.files,
        lease_seconds=asked.lease,
    )


def _secrets(asked: ServeOptions) -> list[bytes]:
    from svdpp.serve.auth import NEW_SECRET, read_secrets

    if asked.callback_secret_file is not None:
        return read_secrets(asked.callback_secret_file)
    if asked.callback_hosts:
        raise RequestError("--callback-hosts needs --callback-secret-file", NEW_SECRET)
    return []


def _announce(
    console: Console,
    asked: ServeOptions,
    config: PipelineConfig,
    bound: socket.socket,
    keys: Keys | None,
) -> None:
    url, ranks = _url_of(bound), counted(config.world_size, "rank")
    console.info(
        f"starting {config.model.name} at {url} with {ranks} on {config.device}; data in "
        f"{str(asked.data)!r}"
    )
    if sys.stderr.isatty():
        key = "" if keys is None else " -H 'Authorization: Bearer KEY'"
        sampling = config.sampling
        has_prompt = sampling.family != "svd"
        fields = " -F prompt='the sea at night'" if has_prompt else ""
        if not has_prompt or getattr(sampling, "from_image", False):
            name = "video.mp4" if sampling.from_video else "photo.jpg"
            fields += f" -F input_reference=@{name}"
            fields += "".join(f" -F {video}=@{video}.mp4" for video in sampling.videos)
        console.info(f"first clip: curl{key}{fields} {url}/v1/videos", "Ctrl-C ends it")
    console.json(
        {"schema_version": 1, "url": url, "data": str(asked.data), "model": config.model.name}
    )


def _check_extra(extra: str, modules: tuple[str, ...]) -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise RequestError(
            f"svdpp serve needs the extra {extra}: {', '.join(missing)} is not installed",
            f"pip install 'svdpp[{extra}]'",
            details={"missing": missing},
        )


def _create_key(console: Console, name: str, path: Path | None) -> None:
    from svdpp.serve.auth import add_key

    if path is None:
        raise RequestError("--new-key needs --api-key-file", "add --api-key-file keys.txt")
    key = add_key(path, name)
    if console.as_json:
        console.json({"schema_version": 1, "name": name, "key": key, "file": str(path)})
    else:
        console.info(f"added to {str(path)!r}; the key itself is not stored:")
        console.result(key)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"--host {host!r} is not found: {reason}") from error
    family, kind, protocol, _, address = addresses[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise RequestError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            f"--port {port + 1} or --port 0 takes another one" if port else "",
            details={"host": host, "port": port},
        ) from error
    return bound


def _url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
