"""How the tasks of one call are grouped into batches: the scheduler's one pluggable decision."""

from py_scheduler.batching.fifo import BatchingStrategy, fifo_batching

__all__ = ["BatchingStrategy", "fifo_batching"]
