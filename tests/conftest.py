"""Settings for all tests, and where programs that JAX compiles for them are kept."""

import importlib.metadata
import os
import pathlib
import shutil
import signal
import tempfile

from hypothesis import settings

# Timings are noisy on shared machines, so no example fails for being slow. Without a
# database a failure depends on nothing but the code. Examples differ from run to
# run, so that few of them find in many runs what many find in one.
settings.register_profile("project", deadline=None, database=None, max_examples=40)
settings.load_profile("project")

# Subprocesses of tests treat unraisable errors like the tests do.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Ctrl-C works in tests, and in what they start, where a shell has it ignored, as for
# what a script runs in the background.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config) -> None:
    """Keeps compiled programs out of the user's own cache, in processes of tests too.

    Before anything imports JAX. Every worker has a folder of its own, for as long as it
    runs: JAX does not write its files at once, and half a program can end a process.
    """
    config.addinivalue_line(
        "filterwarnings", "ignore:Error (read|writ)ing persistent compilation cache"
    )
    folder = pathlib.Path(tempfile.mkdtemp(prefix="test-cache-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "jax")
    os.environ.setdefault("XLA_FLAGS", quick_flags())
    # Also programs that compile fast: tests have many, and most of them repeatedly.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def quick_flags() -> str:
    """Flags with which XLA compiles without optimisation, in a quarter of the time."""
    flags = ["--xla_backend_optimization_level=0"]
    # Later versions may not know it, which they refuse.
    if importlib.metadata.version("jax").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
