"""Runners that are children: real ones, ones that a test plays, and the sandboxes of their commands."""
