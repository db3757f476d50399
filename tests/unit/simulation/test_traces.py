"""Workloads from files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import Outcome, SampleDone, TaskState, Timings
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.rollout.files.details import DetailsWriter
from py_scheduler.rollout.groups import group_of
from py_scheduler.simulation.traces import read_trace
from py_scheduler.simulation.workload import SimulatedStep, SimulatedTask

if TYPE_CHECKING:
    from pathlib import Path

TABLE = """seconds,group,step,at_seconds,evaluator_id,is_eval,eval_seconds,note
10,x,1,7.5,math,false,1,somebody else's
20,y,1,,math,,2,
30,x,1,,math,,,
5,,0,,,,,
6,,0,,,,,
1,q,1,,judge,true,,
"""
STEPS = [
    SimulatedStep([SimulatedTask((5.0,)), SimulatedTask((6.0,))], [], batch_id=0),
    SimulatedStep(
        [SimulatedTask((10.0, 30.0), (1.0, 0.0), "math"), SimulatedTask((20.0,), (2.0,), "math")],
        [SimulatedTask((1.0,), evaluator_id="judge")],
        at_seconds=7.5,
        batch_id=1,
    ),
]


def test_a_table_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TABLE)
    assert read_trace(path) == STEPS


def test_blanks_around_what_is_said_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds, group , step\n1, x, 7\n 2,x ,7\n")
    assert read_trace(path) == [SimulatedStep([SimulatedTask((1.0, 2.0))], [], batch_id=7)]


def test_columns_of_other_names_are_allowed_and_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,wait_seconds,eval_score,run_seconds\n1,2,3,4\n")
    assert read_trace(path) == [SimulatedStep([SimulatedTask((1.0,))], [], batch_id=0)]
    (record,) = caplog.records
    assert record.getMessage().endswith("'wait_seconds', 'eval_score', 'run_seconds'")


def test_steps_of_two_namespaces_may_have_the_same_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,step,namespace\n1,7,a\n2,7,b\n3,7,\n4,7,a\n")
    assert read_trace(path) == [
        SimulatedStep([SimulatedTask((1.0,)), SimulatedTask((4.0,))], [], batch_id=7, namespace="a"),
        SimulatedStep([SimulatedTask((2.0,))], [], batch_id=7, namespace="b"),
        SimulatedStep([SimulatedTask((3.0,))], [], batch_id=7, namespace="default"),
    ]


def test_the_same_as_parquet(tmp_path: Path) -> None:
    rows = [
        dict(zip(TABLE.splitlines()[0].split(","), line.split(","), strict=True)) for line in TABLE.splitlines()[1:]
    ]
    path = tmp_path / "trace.parquet"
    pq.write_table(
        pa.table(
            {
                "seconds": [float(row["seconds"]) for row in rows],
                "group": [row["group"] or None for row in rows],
                "step": [int(row["step"]) for row in rows],
                "at_seconds": [float(row["at_seconds"]) if row["at_seconds"] else None for row in rows],
                "evaluator_id": [row["evaluator_id"] or None for row in rows],
                "is_eval": [row["is_eval"] == "true" for row in rows],
                "eval_seconds": [float(row["eval_seconds"] or 0) for row in rows],
            }
        ),
        path,
    )
    assert read_trace(path) == STEPS


def test_what_a_step_wrote_of_its_samples(tmp_path: Path) -> None:
    """Groups are written as they end, and were submitted in the order of their numbers."""
    details = DetailsWriter(tmp_path, "eval", 3, samples=True)
    for task_no in (10, 9):
        task_id = f"s0000000000000000-{task_no}"
        samples = [
            SampleDone(
                task_id=task_id,
                sample_no=no,
                attempt_no=1,
                outcome=Outcome.SOLVED,
                timings=Timings(run_seconds=task_no + no, eval_seconds=0.5),
            )
            for no in range(2)
        ]
        done = TaskDone(
            submission_id="s0000000000000000",
            task_id=task_id,
            client_key="",
            state=TaskState.SUCCEEDED,
            planned_samples=2,
            outcomes={Outcome.SOLVED: 2},
            reason="",
            unix_seconds=0.0,
        )
        details.add(group_of(Task(config=TaskConfig(task_type="math", repeat_times=2)), samples, done))
    (step,) = read_trace(details.paths[0])
    assert step.tasks == [SimulatedTask((9.0, 10.0), (0.5, 0.5)), SimulatedTask((10.0, 11.0), (0.5, 0.5))]


def event(name: str, **fields: object) -> bytes:
    return msgspec.json.encode({"sequence": 1, "namespace": "default", "event": name, **fields}) + b"\n"


def ended(task_id: str, *seconds: float) -> bytes:
    samples = [
        {"sample_no": no, "timings": {"run_seconds": one, "eval_seconds": 0.0}} for no, one in enumerate(seconds)
    ]
    return event("AttemptEnded", task_id=task_id, samples=samples)


def test_what_a_server_recorded(tmp_path: Path) -> None:
    """test_replayed_run.py has the real thing; here is what it seldom meets."""
    path = tmp_path / "events.jsonl"
    tasks = [{"task_id": name, "task": {"config": {"task_type": "math", "is_eval": name == "e"}}} for name in "abe"]
    path.write_bytes(
        event("TrainingResumed")
        + event("TasksAccepted", unix_seconds=100.0, batch_id="7", tasks=tasks, namespace="team")
        + event("AttemptStarted", task_id="a")
        + event("AttemptEnded", task_id="a", samples=[])  # It was tried again.
        + ended("e", 3.0)
        + ended("a", 1.0, 2.0)
        + event("TasksAccepted", unix_seconds=99.0, batch_id=8, tasks=[tasks[0] | {"task_id": "x"}], namespace="team")
        + b"\n"
    )
    (step,) = read_trace(path)
    assert step == SimulatedStep(
        [SimulatedTask((1.0, 2.0), evaluator_id="math")],
        [SimulatedTask((3.0,), evaluator_id="math")],
        batch_id="7",
        namespace="team",
    ), "of b and of the later submit no sample has ended"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.csv", "minutes,a\n3,4\n", r"line 1: the column 'seconds' is missing. The columns are minutes, a"),
        ("x.csv", "seconds,grp\n3,x\n", r"line 1: there is no column 'grp': did you mean 'group'\? .* seconds, grp"),
        ("x.csv", "Seconds\n3\n", r"line 1: there is no column 'Seconds': did you mean 'seconds'\?"),
        ("x.csv", "seconds,group,seconds\n", r"line 1: the column 'seconds' is there twice"),
        ("x.csv", "seconds,group\n3,x\n\n4\n", r"line 4: there are 1 values, and 2 columns in line 1"),
        ("x.csv", "seconds,group\n3,x,y\n", r"line 2: there are 3 values, and 2 columns in line 1"),
        ("x.csv", "seconds,at_seconds\n3,\n3,5\n3,6\n", r"line 4: at_seconds is 6, and 5 in a row of the same step"),
        (
            "x.csv",
            "seconds,group,evaluator_id\n3,x,a\n3,x,b\n",
            r"line 3: evaluator_id is 'b', and 'a' in a row of the same group before",
        ),
        ("x.csv", "", r"line 1: the column 'seconds' is missing. The columns are none"),
        ("x.csv", "seconds\n", r"x\.csv has no sample"),
        ("x.jsonl", "", r"x\.jsonl has no sample"),
        ("x.csv", "seconds\n3\nlong\n", r"x\.csv, line 3: Expected `float`, got `str`"),
        ("x.csv", "seconds\n-3\n", r"x\.csv, line 2: seconds is -3, must be a number from 0 on"),
        ("x.csv", "seconds\nnan\n", r"x\.csv, line 2: seconds is nan"),
        ("x.jsonl", '{"run_seconds": 1}\n[]\n', r"x\.jsonl, line 2: Expected `object`"),
        ("x.jsonl", '{"seconds": 1}\n', r"x\.jsonl, entry 1: .*required field `seconds`"),
        ("x.jsonl", '{"event": "TasksAccepted", "sequence": 9}\n', r"x\.jsonl, event 9: is not as `journal export`"),
        ("x.parquet", "PAR1", r"x\.parquet is not Parquet"),
        ("x.json", "", r"x\.json is none of \.csv, \.parquet, \.jsonl"),
    ],
)
def test_a_fault_is_told_with_its_place(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgumentError, match=said):
        read_trace(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="No such file"):
        read_trace(tmp_path / "x.csv")
