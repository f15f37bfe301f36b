"""`PipelineRanks`: start, rendezvous and end of a pipeline's ranks; the settings they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace

from svdpp.config import PipelineConfig
from svdpp.config.limits import require
from svdpp.config.pipeline import ATTENTION_REPEATS, repeats_bits
from svdpp.driver.clip_metadata import versions
from svdpp.driver.clips import ClipTracker
from svdpp.driver.request import PipelineRequest
from svdpp.driver.request_scheduler import RequestScheduler
from svdpp.driver.resolve import components_on_host, resolve_config
from svdpp.driver.supervisor import Observer, Supervisor, max_silence_seconds
from svdpp.driver.trace import Trace
from svdpp.errors import ClosedError, Interrupted, RequestError, reraisable
from svdpp.launch import process_group
from svdpp.launch.fork_server import modules_for
from svdpp.launch.rendezvous import RendezvousConfig, join_ranks
from svdpp.launch.worker_group import WorkerGroup, start_ranks
from svdpp.launch.world import World, find_world
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.parallel import LayoutName
from svdpp.worker.messages import Event, Started
from svdpp.worker.rank import RankSetup, rank_main
from svdpp.worker.secondary_rank import run_secondary_rank

# Fields of the configuration that `shared_settings` does not copy. `sampling` is left out because
# its fields are copied one by one. `loras` and `denoisers` may have other paths on each host, so
# hashes of the files are compared instead. The other fields may differ between ranks.
_HOST_SPECIFIC_FIELDS = (
    *("sampling", "loras", "clip_loras", "denoisers"),
    *("local_files_only", "start_timeout_seconds"),
)
# Seconds to wait for the end of the pipeline's thread. The thread normally ends within one poll,
# but an observer may block it.
_ABORT_SECONDS = 5.0


def _check_arguments(
    config: PipelineConfig, history_clips: int | None, trace_clips: int | None
) -> None:
    kind = type(config).__name__
    require(isinstance(config, PipelineConfig), f"Pipeline takes a PipelineConfig, got {kind}")
    for limit in (history_clips, trace_clips):
        wrong = f"history_clips and trace_clips must be 1 or more, got {limit}"
        require(limit is None or limit >= 1, wrong, got=limit, minimum=1)


def _choose_backend(config: PipelineConfig, world: World | None) -> str:
    """Check that this host has the ranks' devices; return the backend of `torch.distributed`."""
    backend = process_group.choose_backend(config.device, config.world_size)
    num_local = config.world_size if world is None else world.local_size
    process_group.check_devices(config.device, num_local, launched=world is not None)
    return backend


class PipelineRanks:
    """Ranks of a pipeline. This process starts them, or joins the ranks that a launcher started.

    The pipeline's thread continuously receives events of the ranks. Otherwise a rank would block as
    soon as the buffer of its connection is full. The thread ends when the pipeline is closing and
    all clips are done, when a rank fails, or after `_abort`.
    """

    def __init__(
        self,
        config: PipelineConfig,
        *,
        layout: LayoutName | None = None,
        num_clips: int | None = None,
        checkpoint: Checkpoint | None = None,
        tensor_folder: str | None = None,
        latents_folder: str | None = None,
        profile_path: str | None = None,
        shared_paths: Sequence[str] = (),
        history_clips: int | None = None,
        trace_clips: int | None = None,
        ranks_ignore_signals: bool = False,
        fault: Callable[[int], object] | None = None,
    ) -> None:
        _check_arguments(config, history_clips, trace_clips)
        self.world = find_world()
        """World that a launcher gave this process; None: there is no launcher, and the pipeline
        starts the ranks."""
        self.layout_reason = ""
        """Reason for the choice of the layout, in one line; "" if the user gave the layout."""
        if layout is not None:
            request = PipelineRequest.of(
                config,
                layout=layout,
                num_clips=num_clips,
                launched=self.world,
                checkpoint=checkpoint,
            )
            config, self.layout_reason = request.resolve()
        self.backend = _choose_backend(config, self.world)
        self.config, self.checkpoint = resolve_config(
            config, world=self.world, checkpoint=checkpoint
        )
        self.trace = Trace(config.world_size, trace_clips or history_clips)
        """Measurements of the run so far."""
        self.run_error: BaseException | None = None
        """Error that ended the run before the last clip was finished; None: no such error so
        far."""
        self._setup = RankSetup(
            config=self.config,
            checkpoint=self.checkpoint,
            tensor_folder=tensor_folder,
            latents_folder=latents_folder,
            profile_path=profile_path,
            fault=fault,
        )
        self._scheduler = RequestScheduler(
            self.config, self.checkpoint, keeps_latents=bool(latents_folder)
        )
        self._ignores_signals = ranks_ignore_signals
        self._shared_paths = (*([latents_folder] if latents_folder else []), *shared_paths)
        self._observers: tuple[Observer, ...] = ()
        self._started: dict[int, Started] = {}
        self._is_mixed = False
        self._repeats_bits = True
        self._clips = ClipTracker(
            lambda message: self._running_supervisor.send_to_all(message),
            latents_folder=latents_folder,
            tensor_folder=tensor_folder,
            max_failures=history_clips,
        )
        self._supervisor: Supervisor | None = None
        self._create_thread()

    def _create_thread(self) -> None:
        """Create the pipeline's thread, and the locks and flags that it shares with callers."""
        # The thread is a daemon, so that a program that never leaves the `with` block can still
        # end.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._clips.finisher = self._thread
        self._has_begun = threading.Event()
        self._has_ended = threading.Event()
        # The lock is reentrant, because a signal handler in the same thread may also close the
        # pipeline.
        self._cleanup_lock = threading.RLock()
        self._closed_error = ClosedError("the pipeline was closed before the clip was finished")
        # Lock that is held while clips get indices and are sent to the ranks, so that all ranks get
        # the clips in the same order. It is reentrant, because a signal handler may close the
        # pipeline meanwhile.
        self._submit_lock = threading.RLock()
        # Flags: the `with` block was entered; no more clips are accepted; everything is cleaned up.
        self._is_entered = self._is_closing = self._is_closed = False

    def observe(self, observer: Observer) -> None:
        """Register an observer for all later events of the ranks.

        Args:
            observer: Function that the pipeline's thread calls with the rank and the event. It must
                be quick, and may submit clips but not wait for clips. An exception in it ends the
                run.
        """
        self._observers = (*self._observers, observer)

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of the ranks that this process has started, in the order of the ranks.

        Raises:
            ClosedError: The ranks are not started yet.
        """
        return self._running_supervisor.rank_pids

    def serve(self, *, say: Callable[[str, bool], None]) -> None:
        """Run a rank other than 0 in this process, until rank 0 ends the run.

        If the rank fails, the process exits. Observers get only the events of this rank.

        Args:
            say: Function that prints the last message of this process. Its first argument is the
                message. The second is True if no other process reports the error.

        Raises:
            ClosedError: No launcher has started this process.
            RankError: Rank 0 cannot be reached.
        """
        rendezvous = self._rendezvous_config()
        self._hash_weights()
        run_secondary_rank(
            rank_main,
            self._setup,
            rendezvous,
            device=process_group.device_of_rank(self.config.device, rendezvous.world),
            observers=self._observers,
            say=say,
            ignores_signals=self._ignores_signals and rendezvous.world.on_first_host,
        )

    def dismiss(self) -> None:
        """End all ranks that a launcher started, because there is no work for them.

        Rank 0 calls this method instead of entering the `with` block.

        Raises:
            RankError: A rank does not connect in time.
        """
        if self.world is not None:
            join_ranks(self._rendezvous_config(), lambda _context, _setup: None, None).kill()

    def _launch(self) -> WorkerGroup:
        if self.world is not None:
            return join_ranks(self._rendezvous_config(), rank_main, self._setup)
        return start_ranks(
            rank_main,
            self._setup,
            world_size=self.config.world_size,
            backend=self.backend,
            device=self.config.device,
            preload=modules_for(None if self.checkpoint is None else self.checkpoint.family),
            ignores_signals=self._ignores_signals,
            start_timeout=self.config.start_timeout_seconds,
        )

    def _hash_weights(self) -> None:
        """Compute the hashes of the weights, which the ranks record in latent checkpoints."""
        if self._setup.latents_folder is not None and self.checkpoint is not None:
            parts = components_on_host(self.config, self.checkpoint, self.world)
            hashes = self.checkpoint.file_hashes(parts)
            self._setup = replace(self._setup, weights=hashes)

    def _rendezvous_config(self) -> RendezvousConfig:
        if self.world is None:
            raise ClosedError(
                "no launcher has started this process: use the pipeline in a with block"
            )
        return RendezvousConfig(
            world=self.world,
            backend=self.backend,
            shared_settings=shared_settings(self.config, self.checkpoint),
            shared_paths=self._shared_paths,
            start_timeout=self.config.start_timeout_seconds,
            peer_timeout=max_silence_seconds(self.config),
        )

    # --- start and end of the ranks -------------------------------------------------------------

    @property
    def _running_supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise ClosedError(
                "the pipeline has no ranks yet",
                "use the pipeline inside `with Pipeline(...) as pipeline:`",
            )
        return self._supervisor

    def _check_open(self) -> Supervisor:
        supervisor = self._running_supervisor
        if self._is_closing:
            raise ClosedError("the pipeline is closed: it takes no more clips")
        return supervisor

    def _start(self) -> None:
        """Start or join the ranks, and wait until all are ready for work."""
        self._hash_weights()
        begun = self.trace.begun = self.trace.ready = time.monotonic()
        group = self._launch()
        if self.world is not None:
            # Under a launcher, `_launch` waits until the other ranks connect, and has a timeout of
            # its own for that. So `start_timeout_seconds` counts only from here.
            begun = time.monotonic()
        self._supervisor = Supervisor(
            group, self.config, self._on_event, trace=self.trace, begun=begun
        )
        try:
            self._thread.start()
            self._has_begun.wait()
            if self.run_error is not None:
                raise reraisable(self.run_error)
            if self._has_ended.is_set():
                raise ClosedError("the pipeline was closed while its ranks started")
        except BaseException as error:
            self._abort(error)
            raise

    def _wait_for_end(self) -> None:
        """Wait until all clips are done and the ranks have ended. `_is_closing` must be set."""
        if self._is_closed:
            return
        self._has_ended.wait()
        self._clean_up(self.run_error)
        if self.run_error is not None:
            raise reraisable(self.run_error)

    def _abort(self, error: BaseException | None) -> BaseException | None:
        """End the ranks immediately; wait for their end unless called in the pipeline's thread.

        Args:
            error: Reason that is sent to ranks on other hosts; None: no more results are needed.

        Returns:
            Error that had ended the run before this call; None if no error had ended it.
        """
        if self._supervisor is None:
            return None
        self._is_closing = True
        self._supervisor.abort(self._closed_error)
        if threading.current_thread() is self._thread or self._is_closed:
            return None
        # The thread has no `ident` if the system refused to start it.
        is_running = self._thread.ident is not None
        if not (is_running and self._has_ended.wait(_ABORT_SECONDS)):
            # An observer blocks the pipeline's thread, so this call ends the run without waiting
            # for the thread.
            self._end(self._closed_error)
        failure = self.run_error
        if self.world is not None and isinstance(error, Interrupted):
            if failure is None:
                failure = self._supervisor.find_root_cause()
            elif failure is self._supervisor.interruption:
                # The signal that interrupted this process also ended the other ranks. One of them
                # only reported the signal first, so it is not the cause.
                failure = None
        self._clean_up(failure or error)
        return failure

    def _run(self) -> None:
        reason: BaseException = ClosedError("the pipeline is closed: its ranks have ended")
        try:
            self._running_supervisor.supervise(
                lambda: self._is_closing and self._clips.is_idle, self._has_begun.set
            )
        except BaseException as error:
            reason = error
            if error is not self._closed_error:
                self.run_error = error
        try:
            # If `_abort` has ended the run, ranks that a launcher has started are not killed here:
            # `_abort` first reads their reports to find a failed rank, and then lets `_clean_up`
            # kill them.
            if self.run_error is not None or (reason is self._closed_error and self.world is None):
                self._running_supervisor.kill(self.run_error)
        finally:
            self._end(reason)

    def _end(self, reason: BaseException) -> None:
        self._clips.end(reason)
        self._has_ended.set()
        self._has_begun.set()

    def _clean_up(self, reason: BaseException | None) -> None:
        with self._cleanup_lock:
            if self._is_closed:
                return
            self._running_supervisor.kill(reason)
            self._is_closed = True
            self._clips.clean_up()

    def _on_event(self, rank: int, event: Event) -> None:
        try:
            if isinstance(event, Started):
                self._started[rank] = event
                if len(self._started) == self.config.world_size:
                    allowed = self.config.allow_mixed_devices
                    self._is_mixed = have_mixed_conditions(
                        self._started, self.backend, allowed=allowed
                    )
                    self._repeats_bits = all(
                        repeats_bits(event.conditions) for event in self._started.values()
                    )
            for observer in self._observers:
                observer(rank, event)
        # The tracker makes a clip's result available. It is called last, so that observers see the
        # clip's event first.
        finally:
            self._clips(rank, event)


def shared_settings(config: PipelineConfig, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Return the settings of a pipeline that must be equal on all ranks of a launcher, by name.

    A launcher starts each rank by a separate command, so the ranks compare these settings.

    Args:
        config: Resolved configuration.
        checkpoint: Checkpoint of the configuration's model; None for the dummy model.

    Returns:
        Options, versions and weights as strings, by the names that error messages use.
    """
    parts = (config, config.sampling, config.model)
    values = {field.name: getattr(part, field.name) for part in parts for field in fields(part)}
    values |= asdict(values.pop("parallel"))
    values["model"] = values.pop("name")
    options = {
        name.removesuffix("_seconds").replace("_", " "): str(value)
        for name, value in values.items()
        if name not in _HOST_SPECIFIC_FIELDS
    }
    # Weights of a hub model are identified by the commit, weights in a folder by the fingerprint.
    weights = (checkpoint.revision, checkpoint.fingerprint) if checkpoint else (None, None)
    options["revision"], options["weights fingerprint"] = map(str, weights)
    components = checkpoint.external_components if checkpoint else {}
    options["components"] = ", ".join(f"{part}: {at}" for part, at in sorted(components.items()))
    for name, files in (
        ("LoRA", checkpoint.loras if checkpoint else ()),
        ("denoiser", checkpoint.denoisers if checkpoint else ()),
    ):
        options[name] = ", ".join(file.identity for file in files)
    return {**options, **{name: str(version) for name, version in versions().items()}}


def have_mixed_conditions(started: Mapping[int, Started], backend: str, *, allowed: bool) -> bool:
    """Whether ranks differ in devices or library versions. If that is not allowed, raise an error.

    Such differences can change the bits of clips.

    Args:
        started: `Started` event of each rank, with its device and the conditions that can change
            bits, such as versions of libraries.
        backend: Backend of the process group. With NCCL, ranks cannot share a GPU.
        allowed: Whether ranks are allowed to differ.

    Raises:
        RequestError: Ranks differ although this is not allowed, or two ranks with NCCL have the
            same GPU.
    """
    owners: dict[str, int] = {}
    for rank, event in sorted(started.items()):
        if event.uuid is None or backend != "nccl":
            continue
        if (other := owners.setdefault(event.uuid, rank)) != rank:
            raise RequestError(
                f"ranks {other} and {rank} have the same GPU ({event.uuid}), and NCCL allows one "
                "rank per GPU",
                "give each task its own GPU, or use `device` cuda:0 to share one GPU over gloo",
                details={"ranks": [other, rank], "uuid": event.uuid},
            )
    of_rank_0 = started[0].conditions
    differences = [
        {"rank": rank, "condition": name, "value": value, "rank_0_value": of_rank_0.get(name)}
        for rank, event in sorted(started.items())
        for name, value in event.conditions.items()
        if name != ATTENTION_REPEATS and value != of_rank_0.get(name)
    ]
    if differences and not allowed:
        found = differences[0]
        raise RequestError(
            f"rank {found['rank']} has {found['condition']} {found['value']}, rank 0 has "
            f"{found['rank_0_value']}: the clips may have other bits than on one device",
            "use equal GPUs and versions, or use `allow_mixed_devices`, which marks the clips as "
            "unproven",
            details={**found, "rank_0": 0},
        )
    return bool(differences)
