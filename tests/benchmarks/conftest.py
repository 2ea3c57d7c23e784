"""Fixtures of these tests."""

from curve_testing import config_text, make_run

__all__ = ["config_text", "make_run"]
