"""What a training loop writes down, and how it is read back."""
