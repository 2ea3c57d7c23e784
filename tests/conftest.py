"""Settings for all tests, and where programs that JAX compiles for them are kept."""

import hashlib
import os
import pathlib
import platform

from hypothesis import settings

# Timings are noisy on shared machines, so no example fails for being slow. Without a
# database a failure depends on nothing but the code.
settings.register_profile("project", deadline=None, database=None)
settings.load_profile("project")

# Subprocesses of tests treat unraisable errors like the tests do.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

CACHE_BYTES = 1e9  # Of compiled programs that are kept between runs of the tests.


def _cache_folder() -> pathlib.Path:
    """Returns the folder of this kind of processor, whose programs others cannot run.

    It is git-ignored, shared by all workers and kept, so that only what has changed is
    compiled again.
    """
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    kind = hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]
    return pathlib.Path(__file__).parents[1] / "build" / "test-cache" / kind


def _shrink(folder: pathlib.Path) -> None:
    """Removes the oldest files until the rest has no more than `CACHE_BYTES`."""
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda item: item[1].st_mtime)
    total = sum(stat.st_size for _, stat in files)
    for path, stat in files:
        if total <= CACHE_BYTES:
            return
        path.unlink()
        total -= stat.st_size


def pytest_configure(config) -> None:
    """Keeps compiled programs out of the user's own cache, in processes of tests too.

    Before anything imports JAX. Variables of the user's own stay.
    """
    # JAX does not write its files at once. Who reads one too early compiles by itself.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error (read|writ)ing persistent compilation cache"
    )
    folder = _cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # Before workers start.
        _shrink(folder)
    os.environ.setdefault("XDG_CACHE_HOME", str(folder))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "jax"))
    # Also programs that compile fast: tests have many, and most of them repeatedly.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
