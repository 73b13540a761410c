"""A disk under host memory: what lies on it, and what is on its way there and back."""
