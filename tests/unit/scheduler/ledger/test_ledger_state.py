"""What is asked of the ledger: which submission is meant."""

from __future__ import annotations

import pytest

from py_scheduler.domain.requests import SubmissionSelector
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import NotFoundError
from py_scheduler.scheduler.ledger.commands import AcceptTasks, AcknowledgeResults, CollectResults
from py_scheduler.scheduler.ledger.state import LedgerState
from tests.support.journal.ledger_driver import Driver, stop, task


def accept(submission_id: str, key: SubmissionKey) -> AcceptTasks:
    return AcceptTasks(f"r-{submission_id}", b"d", key, (task(),), submission_id, 1.0, is_collected=True)


def found(state: LedgerState, selector: SubmissionSelector) -> str | None:
    submission = state.find(selector)
    return None if submission is None else submission.submission_id


def test_a_submission_is_found_by_its_id_and_by_its_batch_id_in_its_own_namespace_alone() -> None:
    mine, theirs = SubmissionKey(7, "mine"), SubmissionKey(7, "theirs")
    ledger = Driver(accept("s", mine), accept("t", theirs)).ledger
    for named in (
        SubmissionSelector(submission_id="s", namespace="mine"),
        SubmissionSelector(batch_id=7, namespace="mine"),
    ):
        assert found(ledger.state, named) == ledger.state.require(named).submission_id == "s"
    assert found(ledger.state, SubmissionSelector(batch_id=7, namespace="theirs")) == "t"
    for named, fault in (
        (SubmissionSelector(submission_id="t", namespace="mine"), "no submission has the id 't' in namespace 'mine'"),
        (SubmissionSelector(batch_id=8, namespace="mine"), "no submission is known as 8 in namespace 'mine'"),
        (
            SubmissionSelector(batch_id="7", namespace="mine"),
            "known as '7' in namespace 'mine'; s is known as 7, which",
        ),
        (SubmissionSelector(namespace="mine"), "name a submission_id or a batch_id"),
    ):
        assert found(ledger.state, named) is None
        with pytest.raises(NotFoundError, match=fault):
            ledger.state.require(named)


def test_a_batch_id_that_was_used_again_means_the_newest_and_the_others_keep_their_ids() -> None:
    key = SubmissionKey(7)
    driver = Driver(accept("s", key), stop())
    driver.tell(CollectResults("s", "c", None, (), (), 2.0))
    driver.tell(AcknowledgeResults(key.namespace, "c", 3.0))
    driver.tell(accept("t", key))
    assert found(driver.ledger.state, SubmissionSelector(batch_id=7)) == "t"
    assert found(driver.ledger.state, SubmissionSelector(submission_id="s")) == "s"
