"""Owns whose job is next: owners take turns; within an owner, priority and age decide.

The owner whose last job was taken longest ago is next. Its `turn` is 0 before the first job, and
becomes the largest of all each time that one of its jobs is taken.
"""

from __future__ import annotations

import heapq
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = tuple[Any, ...]


def by_owner(database: sqlite3.Connection) -> dict[str, int]:
    """The turns of all owners of whom a job was ever taken."""
    return dict(database.execute("SELECT owner, turn FROM owners"))


def take_next(database: sqlite3.Connection) -> int | None:
    """QUEUED to IN_PROGRESS for the next job; its `seq`, or None if none is queued."""
    found = database.execute(
        """
        SELECT seq, jobs.owner, ifnull(owners.turn, 0) FROM jobs
        LEFT JOIN owners ON owners.owner = jobs.owner
        WHERE state = 'queued' AND held IS NULL ORDER BY ifnull(owners.turn, 0), due, seq LIMIT 1
        """
    ).fetchone()
    if found is None:
        return None
    seq, owner, turn = found
    database.execute(
        "INSERT INTO owners SELECT ?, ifnull(max(turn), 0) + 1 FROM owners WHERE true"
        " ON CONFLICT (owner) DO UPDATE SET turn = excluded.turn",
        (owner,),
    )
    change = "state = 'in_progress', started_at = ?, turn = ?"
    database.execute(f"UPDATE jobs SET {change} WHERE seq = ?", (time.time(), turn, seq))
    return int(seq)


def put_back(database: sqlite3.Connection, id: str, *, counts: bool) -> bool:
    """IN_PROGRESS to QUEUED, or to CANCELLED if that was asked for; see `JobStore.put_back`."""
    where = "WHERE id = ? AND state = 'in_progress'"
    found = database.execute(
        f"SELECT owner, turn, cancel_asked FROM jobs {where}", (id,)
    ).fetchone()
    if found is None:
        return False
    owner, turn, cancel_asked = found
    if cancel_asked:
        change = "state = 'cancelled', finished_at = ?"
        database.execute(f"UPDATE jobs SET {change} {where}", (time.time(), id))
        return True
    change = "state = 'queued', started_at = NULL, attempts = attempts + ?"
    database.execute(f"UPDATE jobs SET {change} {where}", (int(counts), id))
    # The owner gets back the turn that it spent on the job.
    database.execute("UPDATE owners SET turn = min(turn, ?) WHERE owner = ?", (turn, owner))
    return True


def in_turn(rows: Iterable[Row], turns: Mapping[str, int]) -> Iterator[Row]:
    """Rows of queued jobs in the order in which `take_next` takes them.

    Args:
        rows: their due, seq, owner and other columns, in the order of due and seq.
        turns: see `by_owner`.
    """
    queues: defaultdict[str, deque[Row]] = defaultdict(deque)
    for row in rows:
        queues[row[2]].append(row)
    largest = max(turns.values(), default=0)
    heap = [(turns.get(owner, 0), *queue[0][:2], owner) for owner, queue in queues.items()]
    heapq.heapify(heap)
    while heap:
        owner = heap[0][3]
        queue = queues[owner]
        yield queue.popleft()
        largest += 1
        if queue:
            heapq.heapreplace(heap, (largest, *queue[0][:2], owner))
        else:
            heapq.heappop(heap)
