"""What every message needs: cursors, enums, errors, and what is wrong with a message."""
