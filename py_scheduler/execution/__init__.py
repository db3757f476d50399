"""Runs episodes: an Evaluator for each batch, resident workers, and the one place where exceptions become outcomes."""
