"""Find the reasons why tokens of a prompt were not cached, by the earlier prompts of its conversation. No I/O."""
