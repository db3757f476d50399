"""Generation by SGLang servers: one server, or a fleet of them behind one backend."""
