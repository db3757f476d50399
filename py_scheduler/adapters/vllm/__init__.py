"""Generation by vLLM servers: one server, or a fleet of them behind one backend."""
