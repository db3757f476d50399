"""Plug-ins into other frameworks. Each imports its framework lazily and says which extra brings it."""
