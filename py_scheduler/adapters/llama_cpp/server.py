"""The child process of the embedded backend: one llama.cpp server, while the parent keeps standard input open.

A process of its own because xllamacpp holds the interpreter's lock while it loads and frees a model, which would stop
the parent's event loop for seconds, and because a fault inside llama.cpp ends its process. Run as a script, with its
settings as JSON in the first argument; it writes the server's address as one line and no more to standard output.
"""

from __future__ import annotations

import json
import os
import sys

ERRORS_ONLY = 1


def main() -> None:
    import xllamacpp  # noqa: PLC0415 - an ImportError is to reach the parent as the reason, below

    settings = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = settings["gguf_path"]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["slots"] * settings["context_length"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.n_threads_http = settings["http_threads"]
    params.cache_ram_mib = settings["prompt_cache_mib"]
    params.ui = False
    # A conversation that ends with the assistant's message is to get the opening of another answer, not be continued.
    params.prefill_assistant = False
    params.verbosity = ERRORS_ONLY
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    # Nothing here is worth an orderly end, which would wait for generations under way.
    os._exit(0)


if __name__ == "__main__":
    main()
