"""Compiled programs and processes of their own, for tests that use JAX."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import jax

TESTS = pathlib.Path(__file__).parent
FOLDERS = (".", "jax", "dreamerv3")  # What programs can import from.
PROGRAM_SECONDS = 270


@contextlib.contextmanager
def compilation_cache(folder):
    """Keeps compiled programs in a folder of the test."""
    from jax.experimental.compilation_cache import compilation_cache as cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(folder), 0.0)):
        jax.config.update(name, value)
    cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        cache.reset_cache()


def run_program(code: str, *arguments: str, **environ: str) -> str:
    """Runs Python on some code, and returns what it printed."""
    (output,) = run_programs(code, [arguments], **environ)
    return output


def run_programs(code: str, each: list[tuple[str, ...]], **environ: str) -> list[str]:
    """Runs Python several times at once, each with its own arguments.

    All must succeed; none is left running.
    """
    # Without what JAX was told in this process.
    told = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_COMPILATION_CACHE_DIR")
    environment = {key: os.environ[key] for key in os.environ if key not in told}
    environment["PYTHONPATH"] = os.pathsep.join(str(TESTS / name) for name in FOLDERS)
    with contextlib.ExitStack() as stack:
        programs = []
        for arguments in each:
            # A file, since a pipe that nobody reads would stop the program.
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            program = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", code, *arguments],
                env={**environment, **environ},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            stack.callback(program.wait)
            stack.callback(program.kill)
            programs.append((program, file))
        outputs = []
        for program, file in programs:
            status = program.wait(timeout=PROGRAM_SECONDS)
            file.seek(0)
            outputs.append(file.read())
            assert status == 0, outputs[-1]
    return outputs
