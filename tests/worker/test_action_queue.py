"""The queue of a rank's actions: lists that come one at a time overlap like one list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import Costs
from svdpp.plan.forecast import replay
from svdpp.plan.layout import Layout
from svdpp.plan.schedule import Schedule, build_schedule
from svdpp.worker.rank import ActionQueue
from tests.plan.schedule_check import check_schedule


def _layouts(most_decode_ranks: int = 1) -> st.SearchStrategy[Layout]:
    def layout(stages: int, replicas: int, decoders: int, steps: int, decode_ranks: int) -> Layout:
        decoders = min(decoders, stages)
        return Layout(
            num_steps=steps + stages,
            world_size=stages * replicas,
            split="alternating",
            replicas=replicas,
            decoders=decoders,
            decode_ranks=1 if decoders > 1 else min(decode_ranks, stages),
        )

    counts = st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.integers(0, 9)
    return st.builds(layout, *counts, st.integers(1, most_decode_ranks))


def _one_by_one(layout: Layout, clips: int) -> list[Schedule]:
    return [build_schedule(layout.routes([clip]), layout.world_size) for clip in range(clips)]


def _emptied(queue: ActionQueue) -> list[Action]:
    actions = []
    while queue:
        actions.append(queue.pop())
    return actions


@given(_layouts(), st.integers(1, 8))
def test_lists_that_wait_join_to_the_list_of_all_clips(layout: Layout, clips: int) -> None:
    together = layout.schedule(clips)
    alone = _one_by_one(layout, clips)
    for rank in range(layout.world_size):
        queue = ActionQueue()
        for schedule in alone:
            queue.add(schedule[rank])
        assert tuple(_emptied(queue)) == together[rank]


@given(_layouts(4), st.integers(1, 8), st.data())
def test_lists_that_come_at_any_time_can_be_performed(
    layout: Layout, clips: int, data: st.DataObject
) -> None:
    performed = []
    for rank in range(layout.world_size):
        queue, done = ActionQueue(), []
        for schedule in _one_by_one(layout, clips):
            for _ in range(data.draw(st.integers(0, 6))):
                done += [queue.pop()] if queue else []
            queue.add(schedule[rank])
        performed.append((*done, *_emptied(queue)))
    check_schedule(tuple(performed), layout.num_steps)
    spans = replay(tuple(performed), Costs())  # raises if the ranks wait for each other
    assert {span.action.clip for span in spans} == set(range(clips))
    for actions in performed:
        assert _most_posted(actions) <= 2


def _most_posted(actions: tuple[Action, ...]) -> int:
    """The largest number of receives that are posted and not yet used."""
    posted: set[int] = set()
    most = 0
    for action in actions:
        if action.kind is Kind.RECV:
            posted.add(action.clip)
        else:
            posted.discard(action.clip)
        most = max(most, len(posted))
    return most
