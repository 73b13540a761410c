"""Offline generation: the engine in this process, no server.

python examples/generate_offline.py [FOLDER]     a Hugging Face checkpoint; without one a small random model
"""

import sys

from engine import LLM, SamplingParams


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    system_prompt = "You are a helpful assistant. " * 20
    prompts = [system_prompt + "Name a colour.", system_prompt + "Name a river."]
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16)):
        print(f"{output.num_cached_tokens:>4} of {len(output.prompt_token_ids)} prompt tokens were cached")
        print(f"     {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
