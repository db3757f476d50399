"""Children as processes and as Ray actors, and a child's own end of an episode."""
