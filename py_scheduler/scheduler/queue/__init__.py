"""What waits for room: who is next, who holds others back, and why somebody waits."""
