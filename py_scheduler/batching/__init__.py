"""How the tasks of one call are grouped into batches, and in which order: the scheduler's one pluggable decision."""

from py_scheduler.batching.fifo import BatchingStrategy, fifo_batching, fill_fifo
from py_scheduler.batching.interleave import interleave

__all__ = ["BatchingStrategy", "fifo_batching", "fill_fifo", "interleave"]
