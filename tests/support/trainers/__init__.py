"""What a trainer does: it asks for room, pulls results and updates weights."""
