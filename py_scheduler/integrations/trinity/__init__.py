"""For Trinity-RFT 0.6: its explorer on this scheduler, by one import.

    from py_scheduler.integrations.trinity import Scheduler  # instead of trinity.explorer.scheduler

It takes Trinity's own Config, Task and Workflow, gives its Status, and runs its WorkflowRunner actors. Everything else
is `py_scheduler.interfaces.trinity`, whose names are here too.
"""

from py_scheduler.integrations.trinity.actors import RunnerWrapper as RunnerWrapper
from py_scheduler.integrations.trinity.scheduler import Scheduler as Scheduler
from py_scheduler.interfaces.trinity import CompletedTaskResult as CompletedTaskResult
from py_scheduler.interfaces.trinity import RunningTaskState as RunningTaskState
from py_scheduler.interfaces.trinity import TaskWrapper as TaskWrapper
from py_scheduler.interfaces.trinity import sort_batch_id as sort_batch_id
