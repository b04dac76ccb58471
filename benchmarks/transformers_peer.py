"""transformers' own continuous batching and prefill, in a process of its own; one JSON line on stdout.

Offline, so it pays for no HTTP, no detokenizing and no streaming: the comparison is in its favour.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


def main() -> None:
    """Reads {"model", "prompts", "max_tokens", "concurrency", "ttft_prompt", "repeats"} from stdin."""
    order = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.bfloat16)
    model.train(False)
    seconds: list[float] = []
    with torch.inference_mode():
        prompt = torch.tensor([order["ttft_prompt"]])
        for _ in range(order["repeats"] + 1):
            start = time.perf_counter()
            model.generate(prompt, max_new_tokens=1, do_sample=False, pad_token_id=0)
            seconds.append(time.perf_counter() - start)
    result: dict[str, object] = {"ttft_seconds": seconds[1:]}
    if order["prompts"]:
        config = GenerationConfig(max_new_tokens=order["max_tokens"], do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(max_requests_per_batch=order["concurrency"])
        start = time.perf_counter()
        outputs = model.generate_batch(order["prompts"], config, continuous_batching_config=batching)
        wall = time.perf_counter() - start
        num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
        result |= {"wall_seconds": wall, "output_tokens": num_tokens, "output_tokens_per_second": num_tokens / wall}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
