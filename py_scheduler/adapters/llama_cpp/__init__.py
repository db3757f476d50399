"""The embedded backend: llama.cpp in a child process of this machine."""
