"""What transformers makes of a model, asked in lines of JSON: reference.py VERSION=FOLDER ..., in SGLang's environment.

{"prompt": ids, "new_tokens": n, "version": v}      -> {"token_ids": ids}, the most probable continuation
{"token_ids": ids, "temperature": t, "version": v}  -> {"log_probs": those of all ids but the first}
{"text": text}                                      -> {"token_ids": ids}
{"messages": [{"role", "content"}]}                 -> {"token_ids": ids}, ready for an answer
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    def __init__(self, folders: dict[str, str]) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())))
        self._models = {
            version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for version, folder in folders.items()
        }

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "prompt" in question:
            return {"token_ids": self._continue(question["prompt"], question["new_tokens"], question["version"])}
        if "token_ids" in question:
            return {"log_probs": self._score(question["token_ids"], question["temperature"], question["version"])}
        if "text" in question:
            return {"token_ids": self._tokenizer.encode(question["text"], add_special_tokens=False)}
        messages = question["messages"]
        return {"token_ids": self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]}

    def _continue(self, prompt: list[int], new_tokens: int, version: str) -> list[int]:
        given = torch.tensor([prompt])
        whole = self._models[version].generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=new_tokens, do_sample=False
        )
        continuation: list[int] = whole[0, len(prompt) :].tolist()
        return continuation

    def _score(self, token_ids: list[int], temperature: float, version: str) -> list[float]:
        ids = torch.tensor([token_ids])
        log_probs = torch.log_softmax(self._models[version](ids).logits[0, :-1] / temperature, dim=-1)
        scores: list[float] = log_probs.gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        return scores


def main() -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        reference = Reference(dict(argument.split("=", 1) for argument in sys.argv[1:]))
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(reference.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
