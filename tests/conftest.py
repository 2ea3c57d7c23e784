"""Settings and fixtures for all tests, and a separate cache for compiled programs."""

import importlib.metadata
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# Timings are noisy on shared machines, so no example fails for being slow. Without a
# database a failure depends on nothing but the code. Examples differ from run to
# run, so that many runs with few examples find as much as one run with many.
settings.register_profile(
    "project",
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("project")

# Subprocesses of tests print their tracebacks at fatal signals, as pytest does.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Restore Ctrl-C in tests and their subprocesses where the shell ignores it, as it does
# for background jobs of scripts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def small_disk(tmp_path, request):
    """A file system with little room, by default of 4 MB."""
    folder, size = tmp_path / "disk", getattr(request, "param", "4m")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


def pytest_configure(config) -> None:
    """Keeps tests and their subprocesses out of the user's own cache and keys.

    Runs before anything imports JAX. Every pytest worker has its own folder while it
    runs: JAX does not write its files atomically, and half a program can end a process.
    """
    config.addinivalue_line(
        "filterwarnings", "ignore:Error (read|writ)ing persistent compilation cache"
    )
    folder = pathlib.Path(tempfile.mkdtemp(prefix="test-cache-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "jax")
    os.environ.setdefault("XLA_FLAGS", quick_flags())
    # Cache fast compilations too: tests have many, and repeat most of them.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def quick_flags() -> str:
    """Returns flags for XLA to skip optimisation, for a quarter of the compile time."""
    flags = ["--xla_backend_optimization_level=0"]
    # XLA refuses unknown flags, and later versions may not know this one.
    if importlib.metadata.version("jax").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)
