"""What a training step makes of finished samples: figures and files."""
