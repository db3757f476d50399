"""The journal in a SQLite database: what was acknowledged survives the end of the process, however it ends."""

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal

__all__ = ["SqliteJournal"]
