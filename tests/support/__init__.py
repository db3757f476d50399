"""What the tests share: clocks, handlers, harnesses, oracles."""
