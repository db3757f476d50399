"""The embedded engine: llama.cpp in a child process of this machine."""
