"""`svdpp serve`: the HTTP service, with options for address, data, keys, limits and retention."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from svdpp.cli.command import command_settings, with_option_groups
from svdpp.cli.console import Console
from svdpp.cli.options.declare import COSTS, SERVICE, VIDEO, flag, in_range, option, path_option
from svdpp.cli.options.files import ImageOptions, LogOptions
from svdpp.cli.options.pipeline import (
    PipelineOptions,
    gpus_option,
    layout_options_field,
    seconds_option,
)
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS, check_seconds, is_number, require, shown
from svdpp.errors import Interrupted, RequestError, pluralize
from svdpp.launch.world import World, is_secondary_rank

if TYPE_CHECKING:
    from svdpp.config import Lora, PipelineConfig
    from svdpp.serve.settings import ServerSettings

#: Modules that each extra of the package, such as `svdpp[serve]`, installs.
_EXTRAS = {
    "serve": ("fastapi", "uvicorn", "python_multipart", "prometheus_client"),
    "fleet": ("psycopg", "fsspec", "s3fs"),
}
# `--layout auto` needs a number of clips for its forecast. A server, which does not know how many
# clips it will make, assumes this number.
_MANY_CLIPS = 1000


app = typer.Typer(add_completion=False)


def _service(metavar: str, help: str, **more: Any) -> Any:
    return option(panel=SERVICE, metavar=metavar, help=help, **more)


def _limit(metavar: str, help: str, most: int, **more: Any) -> Any:
    return _service(metavar, help, callback=in_range(1, most), **more)


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PipelineOptions, ImageOptions):
    """Options of `svdpp serve`: pipeline, address, data, keys, limits and retention."""

    host: Annotated[
        str,
        _service(
            "HOST",
            "Address to listen on; one that other machines reach needs --api-key-file.",
            common=True,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, _service("PORT", "Port; 0 takes a free one.", callback=in_range(0, 65535), common=True)
    ] = 8000
    data: Annotated[
        Path,
        path_option(
            panel=SERVICE,
            metavar="DIR",
            help="Folder of the queue, images and clips.",
            common=True,
            envvar="SVDPP_DATA",
            show_envvar=False,
        ),
    ] = Path("svdpp-data")
    queue: Annotated[
        str | None,
        _service(
            "URL",
            "Database of a queue that several servers share, such as postgresql://svdpp@db/svdpp. "
            "They must also share the --data folder, or --files.",
            common=True,
            envvar="SVDPP_QUEUE",
            show_envvar=False,
        ),
    ] = None
    files: Annotated[
        str | None,
        _service(
            "URL",
            "With --queue: store of images and clips that the servers share, such as "
            "s3://bucket/prefix; each server then has its own --data folder.",
            common=True,
            envvar="SVDPP_FILES",
            show_envvar=False,
        ),
    ] = None
    lease: Annotated[
        float,
        _service(
            "SECONDS",
            "With --queue: time after which other servers take over the clips of a server that is "
            "silent.",
        ),
    ] = 30.0
    lora_dir: Annotated[
        Path | None,
        path_option(
            panel=SERVICE,
            metavar="DIR",
            help="Let requests name the LoRAs in this folder, by file name without .safetensors.",
        ),
    ] = None
    adopt: Annotated[
        bool,
        flag(
            "--adopt",
            panel=SERVICE,
            help="Start a new queue in a --data folder that has other files; they are left alone.",
        ),
    ] = False
    api_key_file: Annotated[
        Path | None,
        path_option(
            panel=SERVICE,
            metavar="FILE",
            help="Serve only requests with a key in this file.",
            common=True,
        ),
    ] = None
    new_key: Annotated[
        str | None,
        _service(
            "NAME",
            "Add a new key to --api-key-file, print it, and end.",
            show_default="start the server",
        ),
    ] = None
    callback_hosts: Annotated[
        list[str] | None,
        _service(
            "HOST[:PORT]",
            "Host to which a request's callback_url may point, repeatable; without a port: the "
            "default port of the URL's scheme. A receiver with a private IP address must be listed "
            "by this address. Needs --callback-secret-file.",
            show_default="none",
        ),
    ] = None
    callback_secret_file: Annotated[
        Path | None,
        path_option(
            panel=SERVICE,
            metavar="FILE",
            help="Sign webhooks with the secrets in this file; each line is whsec_ and base64.",
        ),
    ] = None
    max_queue: Annotated[
        int, _limit("N", "Most clips that wait or are in progress at once.", 100_000)
    ] = 1000
    max_upload_mb: Annotated[
        int, _limit("MIB", "Largest upload: the image with its form, in MiB.", 256)
    ] = 32
    max_steps: Annotated[int, _limit("N", "Most steps that a request may ask for.", MAX_STEPS)] = (
        MAX_STEPS
    )
    max_frames: Annotated[
        int, _limit("N", "Most frames that a request may ask for.", MAX_FRAMES)
    ] = MAX_FRAMES
    keep_days: Annotated[
        float | None,
        _service(
            "DAYS",
            "Remove finished clips, and their rows in the queue, after this number of days.",
            show_default="never",
        ),
    ] = None
    keep_gb: Annotated[
        float | None,
        _service(
            "GB",
            "Remove the oldest finished clips when all of them take more space than this.",
            show_default="no limit",
        ),
    ] = None
    verify_when_idle: Annotated[
        bool,
        flag(
            "--verify-when-idle",
            panel=SERVICE,
            help="While nothing waits, make finished clips again on one device and compare their "
            "bits.",
        ),
    ] = False
    steps: Annotated[
        int | None,
        option(
            panel=VIDEO,
            metavar="N",
            help="Steps of a clip whose request names none; 28 for SVD.",
            common=True,
        ),
    ] = None
    num_frames: Annotated[
        int | None,
        option(
            "--frames",
            panel=VIDEO,
            metavar="F",
            help="Frames of a clip whose request names none.",
            common=True,
        ),
    ] = None
    sizes: Annotated[
        str | None,
        option(
            panel=VIDEO,
            metavar="WxH,WxH",
            help="Further frame sizes that requests may ask for, such as 768x448.",
            show_default="none",
        ),
    ] = None
    world: Annotated[int | None, gpus_option("all GPUs, or 2 on the CPU")] = None
    parallel: Mapping[str, Any] = layout_options_field(
        split="alternating; balanced for a model with two experts"
    )
    time_scale: Annotated[
        float | None,
        option(
            panel=COSTS,
            metavar="X",
            help="Make --model dummy sleep for X times the seconds in --costs.",
            show_default="no sleep",
        ),
    ] = None
    timeout: Annotated[
        float,
        seconds_option(
            "--timeout", "Start the ranks again if one makes no progress for this long."
        ),
    ] = 600.0
    start_timeout: Annotated[
        float,
        seconds_option(
            "--start-timeout", "Start the ranks again if they are not ready after this long."
        ),
    ] = 600.0
    grace: Annotated[
        float,
        seconds_option("--grace", "On SIGTERM, finish the clips in progress within this time."),
    ] = 30.0
    heartbeat_timeout: Annotated[
        float,
        seconds_option(
            "--heartbeat-timeout", "Start the ranks again if one sends no heartbeat for this long."
        ),
    ] = 15.0

    # `seed` is not an option of `svdpp serve`, because each request has its own seed.
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("lease", self.lease)
        is_database = (self.queue or "postgres://").startswith(("postgresql://", "postgres://"))
        require(is_database, "--queue takes a URL such as postgresql://svdpp@db/svdpp")
        is_store = self.files is None or (self.queue is not None and "://" in self.files)
        require(is_store, "--files takes a URL such as s3://bucket/prefix, and needs --queue")
        is_signed = not self.callback_hosts or self.callback_secret_file is not None
        require(is_signed, "--callback-hosts needs --callback-secret-file")
        if self.grace:
            check_seconds("grace", self.grace)
        for name, value in (("--keep-days", self.keep_days), ("--keep-gb", self.keep_gb)):
            is_valid = value is None or (is_number(value) and value > 0)
            wrong = f"{name} must be a finite number above 0, got {shown(value)}"
            require(is_valid, wrong, option=name, above=0, value=value)

    def all_sizes(self) -> tuple[tuple[int, int], ...]:
        """Return all frame sizes that the server offers, as (width, height); the default is first.

        Raises:
            RequestError: `--sizes` is not a list of sizes, or the model cannot make one of them.
        """
        sampling = self.sampling_config()
        sizes = [(sampling.width, sampling.height)]
        for part in () if self.sizes is None else self.sizes.split(","):
            match = re.fullmatch(r"\s*(\d{1,5})x(\d{1,5})\s*", part, re.ASCII)
            if match is None:
                wrong = f"--sizes takes sizes such as 1024x576,768x448, got {self.sizes!r}"
                raise RequestError(wrong, details={"examples": "1024x576,768x448", "value": part})
            width, height = int(match[1]), int(match[2])
            # `replace` raises an error if the model's family does not allow the size.
            sized = replace(sampling, width=width, height=height)
            sizes.append((sized.width, sized.height))
        return tuple(dict.fromkeys(sizes))


@app.command(
    **command_settings(
        "svdpp serve --gpus 7 --data clips",
        "svdpp serve --new-key alice --api-key-file keys.txt",
    )
)
@with_option_groups
def serve(console: Console, launched: World | None, options: ServeOptions, log: LogOptions) -> None:
    """Serve clips over HTTP, with a web page and a queue that survives crashes.

    After the first SIGTERM or Ctrl-C, the server accepts no more requests and finishes the clips in
    progress; unfinished clips continue at the next start. A second signal ends the server at once.
    """
    if options.new_key is not None:
        _create_key(console, options.new_key, options.api_key_file)
        return
    for extra in ("serve",) if options.queue is None else ("serve", "fleet"):
        missing = [name for name in _EXTRAS[extra] if find_spec(name) is None]
        wrong = f"svdpp serve needs the extra {extra}; not installed: {', '.join(missing)}"
        require(not missing, wrong, f"pip install 'svdpp[{extra}]'", extra=extra, missing=missing)
    from svdpp.media.output_files import private_files

    try:
        # The block sets the umask. It begins before the ranks are started, because the ranks write
        # clips and inherit the umask.
        with private_files():
            if is_secondary_rank(launched):
                _serve_rank(console, options, launched, log)
            else:
                _serve(console, options, launched, log)
    except Interrupted:
        console.info("the server ended before it accepted requests")


def _serve_rank(console: Console, options: ServeOptions, launched: World, log: LogOptions) -> None:
    """Run a rank other than rank 0 of `svdpp serve`. Only rank 0 serves HTTP."""
    from svdpp.cli.progress import serve_member
    from svdpp.driver.pipeline import Pipeline

    config, _ = _config(options, launched)
    log.open(console, launched, warns=True)
    pipeline = Pipeline(
        config,
        latents_folder=str(options.data.absolute() / "latents"),
        history_clips=1,
        ranks_ignore_signals=True,
    )
    serve_member(pipeline, launched, console)


def _serve(
    console: Console, options: ServeOptions, launched: World | None, log: LogOptions
) -> None:
    """Check the options of `svdpp serve`, and serve HTTP until a signal arrives."""
    from svdpp.cli.progress import EventLog
    from svdpp.launch.fork_server import start_fork_server_early
    from svdpp.serve.auth import load_keys
    from svdpp.serve.server import Server, build

    sizes = options.all_sizes()
    keys = load_keys(options.host, options.api_key_file)
    with _bind(options.host, options.port) as bound:
        config, why = _config(options, launched)
        if launched is None:
            start_fork_server_early(family=options.loaded_family, device=config.device)
        log.open(console, launched, warns=True)
        console.info(why)
        settings = _settings(options, sizes, config)
        app, service = build(settings, keys)
        service.engine.observe(EventLog(settings.config.layout, service.engine.name_of))
        server = Server(
            app,
            service,
            bound,
            grace_seconds=options.grace,
            on_listening=lambda: _announce(console, options.data, settings.config, bound),
            on_ready=lambda: console.info("ready to make clips"),
        )
        server.run()
    console.info("ended; unfinished clips continue at the next start")


def _config(options: ServeOptions, launched: World | None) -> tuple[PipelineConfig, str]:
    loras: tuple[Lora, ...] = ()
    if options.lora_dir is not None:
        from svdpp.models.lora_files import loras_in_folder

        checkpoint = options.checkpoint
        loras = loras_in_folder(
            options.lora_dir, 1 if checkpoint is None else checkpoint.num_experts
        )
    return options.request(
        num_clips=None if launched else _MANY_CLIPS,
        launched=launched,
        # Ranks that are started for clips from images can also make clips from text, if the model
        # does both.
        from_image=options.image_use != "refused",
        clip_loras=loras,
        serves=True,
        time_scale=options.time_scale,
        settings={"heartbeat_timeout_seconds": options.heartbeat_timeout},
    ).resolve()


def _settings(
    options: ServeOptions, sizes: tuple[tuple[int, int], ...], config: PipelineConfig
) -> ServerSettings:
    from svdpp.serve.auth import read_secrets
    from svdpp.serve.server import check_config
    from svdpp.serve.settings import ServerSettings

    config = check_config(config, sizes)
    steps, frames = config.sampling.num_inference_steps, config.sampling.frames
    limits = (("steps", options.max_steps, steps), ("frames", options.max_frames, frames))
    for name, most, default in limits:
        wrong = f"--max-{name} {most} is less than the {default} {name} of a clip by default"
        require(default <= most, wrong, f"add --{name} {most} or less", most=most, default=default)
    secret_file = options.callback_secret_file
    return ServerSettings(
        config=config,
        folder=options.data,
        sizes=sizes,
        max_open=options.max_queue,
        max_steps=options.max_steps,
        max_frames=options.max_frames,
        upload_bytes=options.max_upload_mb * 2**20,
        max_pixels=options.max_megapixels * 10**6,
        keep_seconds=None if options.keep_days is None else options.keep_days * 86400,
        keep_bytes=None if options.keep_gb is None else int(options.keep_gb * 1e9),
        verifies_when_idle=options.verify_when_idle,
        adopts=options.adopt,
        callback_hosts=options.callback_hosts or (),
        callback_secrets=() if secret_file is None else read_secrets(secret_file),
        queue_url=options.queue,
        store_url=options.files,
        lease_seconds=options.lease,
    )


def _announce(console: Console, data: Path, config: PipelineConfig, bound: socket.socket) -> None:
    model, url, ranks = config.model.name, _url_of(bound), pluralize(config.world_size, "rank")
    console.info(
        f"starting {model} at {url} with {ranks} on {config.device}; data in {str(data)!r}"
    )
    console.json({"schema_version": 1, "url": url, "data": str(data), "model": model})


def _create_key(console: Console, name: str, path: Path | None) -> None:
    from svdpp.serve.auth import add_key

    if path is None:
        raise RequestError("--new-key needs --api-key-file", "add --api-key-file keys.txt")
    key = add_key(path, name)
    console.info(
        f"added to {str(path)!r}, without the key itself; keep this key, it is not shown again:"
    )
    console.json({"schema_version": 1, "name": name, "key": key, "file": str(path)})
    console.result(key)


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; for port 0 the system chooses a free port."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:
        if bound is not None:
            bound.close()
        is_host = isinstance(error, socket.gaierror | UnicodeError)
        raise RequestError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}",
            f"--port {port + 1} or --port 0 takes another port" if port and not is_host else "",
            details={"host": host, "port": port, "reason": str(error)},
        ) from error
    return bound


def _url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
