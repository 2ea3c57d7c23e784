"""The command line: configuration, logdir, factories and programs."""
