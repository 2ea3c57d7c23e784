"""Settings for all tests."""

import os

from hypothesis import settings

# Timings are noisy on shared machines, so no example fails for being slow. Without a
# database a failure depends on nothing but the code.
settings.register_profile("project", deadline=None, database=None)
settings.load_profile("project")

# Subprocesses of tests treat unraisable errors like the tests do.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
