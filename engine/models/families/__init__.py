"""One small file a model family."""
