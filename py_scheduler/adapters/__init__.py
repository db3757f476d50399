"""The outside world: backends, journals, clocks; each implements a port of `domain.ports` and knows nothing else."""
