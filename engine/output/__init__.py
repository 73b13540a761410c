"""Generated tokens become answer text, reasoning and tool calls, piece by piece."""
