"""Readers of one tool call each, in JSON, XML or Python: text in, a name and arguments as JSON out."""
