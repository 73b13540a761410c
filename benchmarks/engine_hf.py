"""Hugging Face's `generate` in a process of its own: JSON lines of prompts in, times of every step out.

Its best reasonable use: bf16 as the checkpoint says (or another dtype, where that is faster), sdpa attention, inference
mode, static batches, padded on the left with a mask where lengths differ, a streamer that only notes the time. No
server, no detokenising.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import _path  # noqa: F401


def main(model_path: str, threads: int, dtype: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="sdpa").eval()

    class Clock(BaseStreamer):  # type: ignore[misc]
        """The first `put` brings the prompt, every other one token of each sequence."""

        def __init__(self) -> None:
            self.times_s: list[float] = []

        def put(self, value: Any) -> None:
            self.times_s.append(time.perf_counter())

        def end(self) -> None:
            pass

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        width = max(map(len, prompts))
        start_s = time.perf_counter()
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        clock = Clock()
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        end_s = time.perf_counter()
        assert out.shape[1] == width + output_len, f"{out.shape[1] - width} tokens instead of {output_len}"
        times_s = clock.times_s[1:]
        return {"ttft_s": times_s[0] - start_s, "times_s": times_s, "wall_s": end_s - start_s}

    print(json.dumps({"ready": str(model.dtype), "cpu_s": time.process_time()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        found = generate(order["prompts"], order["output_len"])
        print(json.dumps({**found, "cpu_s": time.process_time()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
