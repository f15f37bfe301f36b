"""Run svdpp's command line with an injected fault, and write all events of the ranks to a file.

    python -m tests.support.injected PLAN.json run ...

PLAN.json has the key `events`, the path of the file for the events; each line of that file is a
JSON object. It may also have `stop`, the fields of a `Damage`, and `leaving_seconds`, the seconds
for which the process of rank 0 waits before it leaves the pipeline.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    from svdpp.__main__ import main as svdpp
    from svdpp.driver import pipeline

    plan = json.loads(Path(sys.argv.pop(1)).read_text())
    pipeline.Pipeline = _injected(plan)  # type: ignore[misc]
    svdpp()


def _injected(plan: dict[str, Any]) -> type:
    from svdpp.driver.pipeline import Pipeline
    from tests.support.damage import Damage

    def note(**event: Any) -> None:
        with Path(plan["events"]).open("a") as file:
            file.write(json.dumps(event) + "\n")

    class Injected(Pipeline):
        def __init__(self, config: Any, **options: Any) -> None:
            if "stop" in plan:
                options["fault"] = Damage(**plan["stop"])
            super().__init__(config, **options)
            self.observe(self._note)

        def _note(self, rank: int, event: Any) -> None:
            fields = event.model_dump()
            if getattr(event, "action", None) is not None:
                fields["action"] = str(event.action)
            note(rank=rank, kind=type(event).__name__, **fields)

        def __exit__(self, *error: Any) -> None:
            if "leaving_seconds" in plan:
                note(rank=-1, kind="leaving")
                time.sleep(plan["leaving_seconds"])
            super().__exit__(*error)

    return Injected


if __name__ == "__main__":
    main()
