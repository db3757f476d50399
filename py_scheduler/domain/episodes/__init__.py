"""What an episode is made of: its settings, its turns and tokens, what it may ask for."""
