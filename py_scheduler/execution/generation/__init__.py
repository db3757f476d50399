"""The one place through which every episode generates."""
