"""Turns a GGUF file of the Llama family into the folder that SGLang loads: dequantise.py FILE FOLDER.

Runs in SGLang's environment. Its weights become plain float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What was read remembers that it was quantised and refuses to be saved; a model made of its parts does not.
    config = read.config
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict())
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: {sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} M weights")


if __name__ == "__main__":
    main()
