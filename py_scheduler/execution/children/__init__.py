"""Runners that are children outside the loop: processes and Ray actors."""
