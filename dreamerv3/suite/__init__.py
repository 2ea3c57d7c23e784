"""Runs lists of tasks and seeds on the available devices, and compares scores.

    dreamerv3 --script suite --suite.preset atari100k --configs size12m \\
        --suite.seeds 3 --logdir logdir/atari100k

`runner` is the program: it plans the runs by `presets`, finds places for them
(`accelerators`), works through the queue (`run_queue`, `display`), and writes the
results (`score_table`, which is based on `curves` and `aggregates`, and the picture of
`dreamerv3.plot`).
"""
