"""An engine with six jobs in a process that a test kills: `killed_engine FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.serve.engines import dummy_config, serving


def main() -> None:
    folder = Path(sys.argv[1])
    with serving(folder, dummy_config(2, step_seconds=0.05)) as service:
        ids = service.add(*range(6))
        (folder / "ready").touch()
        service.wait_final(ids)


if __name__ == "__main__":
    main()
