"""Small random checkpoints with real configs, tokenizers and weights files: the built-in model and the tests'."""
