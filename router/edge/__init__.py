"""The byte path: a request on its way to the worker that was chosen, and the answer back."""
