"""A chaos test: harms real parallel runs, and then checks their files on its own.

    python -m benchmarks.chaos --minutes 20 --seed 0

It uses only those parts of the product that users know: the command line, signals, and
the files of a logdir. The modules:

    numbered_env   the task of the runs; every observation says which step it is
    programs       starts programs, finds their roles, and ends them by process id
    network        two hosts as network namespaces
    proxy          a TCP proxy that cuts, stalls and delays connections
    site           one run with all that belongs to it, in one topology
    faults         the harm that can be done to a run
    reader         manifests, parts and chunk files, read without the product's code
    audit          the checks of a logdir, and the account of lost transitions
    campaign       runs one after the other, and the summary
"""
