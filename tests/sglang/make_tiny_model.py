"""Makes Llamas of 0.4 M random weights, the same ones each time, with one tokenizer: make_tiny_model.py FOLDER ...

Each FOLDER gets weights of its own, as if it had been trained on from the one before.

Runs in SGLang's environment. A model that never learned anything is as good as any for what is tested: fast, exact,
and what it says are random bytes, which text does not preserve.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<turn>", "</turn>"]
PAD, BEGIN, END = range(3)
CORPUS = (
    "A scheduler decides when and where each sample of a rollout runs, and what came of it goes back to the trainer.",
    "Count the letters of a word, add two numbers, find the least common multiple: the answer is 12, or 21, or 7.",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BEGIN],
        eos_token=SPECIAL_TOKENS[END],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        # Large enough that the best token is not one of many nearly as good, which rounding would choose between.
        initializer_range=0.15,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    tokenizer = make_tokenizer()
    for seed, folder in enumerate(map(Path, sys.argv[1:])):
        tokenizer.save_pretrained(folder)
        make_model(len(tokenizer), seed).save_pretrained(folder)
        print(f"{folder}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
