"""Runners as they are seen from outside, and what children and server say to one another."""
