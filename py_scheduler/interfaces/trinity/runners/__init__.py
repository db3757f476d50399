"""Runners of Trinity's Scheduler: in the loop, or processes."""
