"""Stands in for verl where Trinity imports it without using it."""


class DataProto:
    """Named in signatures of advantage functions."""
