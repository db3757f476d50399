"""The gRPC face of the engine. No logic of its own: decode, call, encode."""
