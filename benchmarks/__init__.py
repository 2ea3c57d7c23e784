"""Benchmarks; each compares in one run and prints one JSON line last."""
