"""Protos <-> domain values, total both ways. Protos stop here: no other layer but api and client sees one."""
