"""A view of runs in the browser: pages, files of logdirs, and a dream to play in."""
