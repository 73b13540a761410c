"""The HTTP server of `engine serve`. Knows no torch."""
