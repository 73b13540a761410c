"""The backend for CPUs: torch where it is fast, native operations where it is not."""
