"""Servers for tests, in the same process and in others, and their clients."""
