"""The words of the system as values, and the ports that adapters implement. No asyncio, no gRPC, no I/O."""
