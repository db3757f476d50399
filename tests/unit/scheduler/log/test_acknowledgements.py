"""What may be dropped, and how much is kept for whom: against a model that remembers every event."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.events import AttemptStarted, EventRecord
from py_scheduler.scheduler.log import acknowledgements
from py_scheduler.scheduler.log.acknowledgements import Acknowledgements

TEAMS = ("a", "b")
EVENTS = st.tuples(st.just("event"), st.sampled_from(TEAMS), st.integers(0, 2), st.integers(1, 400_000))
ACKS = st.tuples(st.just("ack"), st.sampled_from(TEAMS), st.integers(-1, 2), st.floats(0, 1))
DROPS = st.tuples(st.just("drop"), st.sampled_from(TEAMS), st.just(0), st.floats(0, 1))


def record_of(sequence: int, team: str, number: int, size: int) -> EventRecord:
    event = AttemptStarted(
        submission_id=f"{team}-{number}",
        task_id="",
        subtask_no=0,
        attempt_no=1,
        node_ip="",
        gpu_ids=(),
        unix_seconds=0.0,
    )
    return EventRecord(sequence, team, event, size)


@given(st.lists(st.one_of(EVENTS, EVENTS, ACKS, DROPS), max_size=60))
def test_nothing_unread_is_dropped_and_bytes_are_right_to_a_span(steps: list[tuple[str, str, int, float]]) -> None:
    read = Acknowledgements()
    unread: dict[int, tuple[str, str, int]] = {}
    last, oldest = 0, 1
    for what, team, number, amount in steps:
        if what == "event":
            last += 1
            read.count([record_of(last, team, number, int(amount))])
            unread[last] = (team, f"{team}-{number}", int(amount))
        elif what == "ack":
            through = int(amount * last)
            submission_id = "" if number < 0 else f"{team}-{number}"
            read.acknowledge(team, submission_id, through)
            for sequence, (whose, name, _) in list(unread.items()):
                if sequence <= through and whose == team and submission_id in {"", name}:
                    del unread[sequence]
        else:
            oldest = max(oldest, int(amount * last))
            unread = {sequence: entry for sequence, entry in unread.items() if sequence >= oldest}
            for whose in TEAMS:
                read.bytes_in(whose, oldest)
        droppable = read.droppable_through(last)
        assert droppable <= min(unread, default=last + 1) - 1
        for whose in TEAMS:
            exact = sum(size for name, _, size in unread.values() if name == whose)
            told = read.bytes_in(whose, oldest)
            assert exact <= told <= exact + 3 * (acknowledgements._SPAN_BYTES + 400_000)
    for whose in TEAMS:
        read.acknowledge(whose, "", last)
        assert read.bytes_in(whose, oldest) == 0
    assert read.droppable_through(last) == last
    assert not read._readers


def test_who_never_acknowledges_costs_no_more_than_what_is_kept() -> None:
    read = Acknowledgements()
    for number in range(1, 20_001):
        read.count([record_of(number, "a", number, 100)])
        read.forget_before(number - 100)
    assert len(read._readers) < 3_000
    assert len(read._oldest) < 3_000
    assert read.bytes_in("a", 19_901) == 10_000
