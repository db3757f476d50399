"""Whole steps: their rows, their tasks, their samples and what they write."""
