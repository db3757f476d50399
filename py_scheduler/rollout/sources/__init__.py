"""Where a loop's tasks come from."""
