"""Fixtures of the tests of the suite."""

from curve_testing import config_text, make_run

__all__ = ["config_text", "make_run"]
