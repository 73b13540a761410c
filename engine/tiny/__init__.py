"""Small random checkpoints in the files of real ones, for `engine serve` without a model, the demo and tests."""
