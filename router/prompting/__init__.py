"""From a request's body to token ids: the tokenizers of the models served, ours or a worker's."""
