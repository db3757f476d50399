"""Language models and their servers as tests want them, and what asks them."""
