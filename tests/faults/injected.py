"""svdpp's command line with an injected fault; writes all events of the ranks to a file.

    python -m tests.faults.injected PLAN.json run ...

PLAN.json has `events` (path of that file: one JSON object per line, with the time at which the
parent received the event). It may have `stop` (fields of `Damage`), and
`leaving_seconds` (rank 0's process spends them before it leaves the pipeline).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


def main() -> None:
    from svdpp.__main__ import main as svdpp
    from svdpp.driver import pipeline

    plan = json.loads(Path(sys.argv.pop(1)).read_text())
    pipeline.Pipeline = _injected(plan)  # type: ignore[misc]
    svdpp()


def _injected(plan: dict[str, Any]) -> type:
    from svdpp.driver.pipeline import Pipeline
    from tests.faults.damage import Damage

    note = _notes(Path(plan["events"]))

    class Injected(Pipeline):
        def __init__(self, config: Any, **options: Any) -> None:
            if "stop" in plan:
                options["fault"] = Damage(**plan["stop"])
            super().__init__(config, **options)
            self.observe(
                lambda rank, event: note(rank=rank, kind=type(event).__name__, **event.model_dump())
            )

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            where: TracebackType | None,
        ) -> None:
            if "leaving_seconds" in plan:
                note(rank=-1, kind="leaving")
                time.sleep(plan["leaving_seconds"])
            super().__exit__(kind, error, where)

    return Injected


def _notes(path: Path) -> Callable[..., None]:
    file = path.open("a", buffering=1)

    def note(**event: Any) -> None:
        file.write(json.dumps({"heard": time.monotonic(), **event}) + "\n")

    return note


if __name__ == "__main__":
    main()
