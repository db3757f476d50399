"""The Scheduler of seed 2 (Trinity-RFT's explorer), in-process, over the engine that everything else here runs on.

It needs no Trinity: `Config`, `Task`, `Workflow` and `Experience` are plain classes of its own, and whatever has their
fields will do (`protocols.py`). With Trinity: `py_scheduler.integrations.trinity`.

Two kinds of names. What Trinity's users import and subclass has Trinity's own names, because code that was written for
Trinity has to go on: Scheduler, RunnerWrapper, WorkflowRunner, TaskWrapper, Config, Task, Status. What is ours, and
would be mistaken for the engine's own Engine, Config, Task or Runner, begins with Trinity: TrinityEngine,
TrinityRunnerPool, and the protocols, TrinityConfig as the first.

    Scheduler -> RunnerWrapper -> pinned -> TrinityEngine -> runners/ -> mirrors, protocols, workflows
"""

from py_scheduler.interfaces.trinity.config import Config as Config
from py_scheduler.interfaces.trinity.config import DynamicTimeoutConfig as DynamicTimeoutConfig
from py_scheduler.interfaces.trinity.config import ExplorerConfig as ExplorerConfig
from py_scheduler.interfaces.trinity.config import ModelConfig as ModelConfig
from py_scheduler.interfaces.trinity.config import OverRolloutConfig as OverRolloutConfig
from py_scheduler.interfaces.trinity.config import ProcessConfig as ProcessConfig
from py_scheduler.interfaces.trinity.mirrors import CompletedTaskResult as CompletedTaskResult
from py_scheduler.interfaces.trinity.mirrors import RunningTaskState as RunningTaskState
from py_scheduler.interfaces.trinity.mirrors import TaskWrapper as TaskWrapper
from py_scheduler.interfaces.trinity.runners.workflow_runner import Status as Status
from py_scheduler.interfaces.trinity.runners.workflow_runner import WorkflowRunner as WorkflowRunner
from py_scheduler.interfaces.trinity.scheduler import Scheduler as Scheduler
from py_scheduler.interfaces.trinity.workflows import EID as EID
from py_scheduler.interfaces.trinity.workflows import Experience as Experience
from py_scheduler.interfaces.trinity.workflows import RolloutArgs as RolloutArgs
from py_scheduler.interfaces.trinity.workflows import Task as Task
from py_scheduler.interfaces.trinity.workflows import Workflow as Workflow
from py_scheduler.interfaces.trinity.wrapper import RunnerWrapper as RunnerWrapper
from py_scheduler.interfaces.trinity.wrapper import task_to_run as task_to_run
from py_scheduler.scheduler.ledger.records import sort_batch_id as sort_batch_id
