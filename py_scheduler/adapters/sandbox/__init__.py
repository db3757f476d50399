"""Commands in child processes that are kept from the network, from other files and from the machine."""
