"""OpenAI bodies, pure: checked parameters, text from tokens, answers. Knows no socket."""
