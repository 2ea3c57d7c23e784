"""Environments and the registry that makes them by task name."""
