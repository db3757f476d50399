"""Journals and ledgers that tests drive without an engine."""
