"""Room for schedulers that live elsewhere."""
