"""What every test folder shares: Hypothesis without a deadline, since the machines that run this are busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("blockcast", deadline=None)
settings.load_profile("blockcast")
