"""Starts the chaos test from the command line."""

import sys

from benchmarks.chaos.campaign import main

if __name__ == "__main__":
    sys.exit(main())
