"""Several inference servers of one model behind one backend, whichever servers these are."""
