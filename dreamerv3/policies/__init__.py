"""Trained policies outside of training: load, export, import from the reference."""
