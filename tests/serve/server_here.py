"""The real server in this process: real HTTP and real ranks, which start quickly."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from loguru import logger

from svdpp.cli.progress import EventLog
from svdpp.errors import Interrupted
from svdpp.serve.auth import Keys
from svdpp.serve.server import Server, build
from svdpp.serve.service import ServerSettings
from tests.cli.shell import svdpp_here
from tests.serve.http_server import HANG_SECONDS, HttpServer, wait


class ServerHere(HttpServer):
    """`svdpp serve` in this process, whose fork server starts ranks quickly; it cannot be killed.

    Its log is `err`.
    """

    def __init__(
        self, folder: Path, *options: str, key: str | None = None, port: int = 0, grace: float = 0
    ) -> None:
        self.folder = folder
        self.err = self.other_key = ""
        settings, keys = asked(folder, *options)
        self._sink = logger.add(self._note, level="INFO", format="{level} {message}")
        app, self.service = build(settings, keys)
        self.service.engine.observe(EventLog(settings.config.layout, self.service.engine.name_of))
        self._bound = socket.create_server(("127.0.0.1", port))
        is_listening = threading.Event()
        self._server = _UnsignalledServer(
            app,
            self.service,
            self._bound,
            grace_seconds=grace,
            on_listening=is_listening.set,
            on_ready=lambda: self._note("ready to make clips\n"),
        )
        self._switch_seconds = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait(lambda: is_listening.is_set() or not self._thread.is_alive(), lambda: self.err)
        assert is_listening.is_set(), self.err
        self._connect(f"http://127.0.0.1:{self._bound.getsockname()[1]}", key)

    def _note(self, text: str) -> None:
        self.err += text

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self._thread.is_alive():
            self.stop()

    def stop(self, number: int = 0) -> int:  # noqa: ARG002
        self._server._ending.set()
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive()
        self._bound.close()
        with suppress(ValueError):  # a command has set up the log anew
            logger.remove(self._sink)
        # As before the server.
        sys.setswitchinterval(self._switch_seconds)
        gc.unfreeze()
        return 0


class _UnsignalledServer(Server):
    def _catch_signals(self) -> None:
        """A thread cannot."""


def asked(folder: Path, *options: str) -> tuple[ServerSettings, Keys | None]:
    """What the command line asks for."""
    found: list[tuple[ServerSettings, Keys | None]] = []

    def end(settings: ServerSettings, keys: Keys | None) -> None:
        found.append((settings, keys))
        raise Interrupted(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("svdpp.serve.server.build", end)
        answer = svdpp_here("serve", "--port", "0", "--data", str(folder), *options)
    assert found, answer
    return found[0]
