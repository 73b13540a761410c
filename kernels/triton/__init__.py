"""The backend for GPUs."""
