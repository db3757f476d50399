"""The scheduler without a network: the same classes as behind gRPC, called in-process."""
