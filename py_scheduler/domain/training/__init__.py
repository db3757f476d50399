"""Steps of a training loop: where their tasks come from, and what comes out of them."""
