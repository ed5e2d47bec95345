"""What holds for all tests: property tests draw the same examples every time, and no test asserts a time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("gossipx", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gossipx")
