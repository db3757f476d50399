"""The facts: what is known of tasks and attempts, and the one writer that changes it."""
