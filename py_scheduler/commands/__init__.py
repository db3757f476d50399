"""What the commands do that are more than a call: one module for each, beside what it prints."""
