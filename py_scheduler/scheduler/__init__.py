"""Decides when each attempt runs: the ledger of facts, the ready queue, admission, the event log and the engine
around them.
"""
