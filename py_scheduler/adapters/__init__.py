"""The outside world: engines, journals, clocks; each implements a port of `domain.ports` and knows nothing else."""
