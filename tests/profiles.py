"""How much the tests try: the profile named by PAGEDCACHE_TEST_PROFILE.

``full`` (the default) is what a release must pass; ``short`` keeps every test and makes the
long ones small (sanitizer and wheel runs); ``deep`` runs the random tests twenty times longer.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

NAMES = ("short", "full", "deep")
PROFILE = os.environ.get("PAGEDCACHE_TEST_PROFILE", "full")
if PROFILE not in NAMES:
    raise ValueError(f"PAGEDCACHE_TEST_PROFILE={PROFILE!r}: expected one of {', '.join(NAMES)}")

SHORT = PROFILE == "short"
DEEP = PROFILE == "deep"


def scaled(full: int, short: int) -> int:
    """``full`` work in the full profile, 20 times that in ``deep``, ``short`` in ``short``."""
    return {"short": short, "full": full, "deep": 20 * full}[PROFILE]


_COMMON = {
    "deadline": None,  # shared machines pause; a slow example is not a wrong one
    "print_blob": True,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
}

# Properties of one function.
settings.register_profile("short", max_examples=25, **_COMMON)
settings.register_profile("full", max_examples=200, **_COMMON)
settings.register_profile("deep", max_examples=4_000, **_COMMON)

# State machines: 2,000 runs of 50 steps in the full profile.
STATEFUL = settings(max_examples=scaled(2_000, 60), stateful_step_count=50, **_COMMON)
