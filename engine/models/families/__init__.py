"""Model families. Each file builds one family's decoder from its config.json and weights."""
