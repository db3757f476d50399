"""The services, method by method: decode, call, encode."""
