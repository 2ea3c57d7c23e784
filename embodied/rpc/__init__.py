"""Processes, threads and the calls between them."""
