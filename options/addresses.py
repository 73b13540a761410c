"""Hosts and ports in addresses as texts."""

from __future__ import annotations


def bracket_host(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def get_default_port(scheme: str) -> int:
    """Return the port that an HTTP URL without one means."""
    return 443 if scheme == "https" else 80
