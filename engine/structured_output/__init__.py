"""Formats that an answer must match (schemas, patterns, tool calls), as grammars for llguidance."""
