"""Benchmarks; each measures all sides in one run and prints one JSON line last."""
