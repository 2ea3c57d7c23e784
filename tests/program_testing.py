"""Runs programs in separate processes, for tests that use JAX."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

TESTS = pathlib.Path(__file__).parent
FOLDERS = (".", "jax", "dreamerv3")  # Programs can import from these.
PROGRAM_SECONDS = 270
# A cache file that another process is still writing is not an error.
WARNINGS = ["-W", "error"]
for verb in ("reading", "writing"):
    WARNINGS += ["-W", f"ignore:Error {verb} persistent compilation cache"]


def run_program(code: str, *arguments: str, **environ: str) -> str:
    """Runs Python on some code, and returns what it printed."""
    (output,) = run_programs(code, [arguments], **environ)
    return output


def run_example(path: pathlib.Path, folder: pathlib.Path, *flags: str) -> str:
    """Runs a program with an agent in a folder, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, path, *flags],
        capture_output=True,
        text=True,
        timeout=390,
        cwd=folder,
        # Quick to compile and slow to run, for programs that run briefly.
        env={**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_programs(code: str, each: list[tuple[str, ...]], **environ: str) -> list[str]:
    """Runs Python several times at once, each with its own arguments.

    All must succeed; none is left running.
    """
    # Drop this process's XLA settings, but keep its folder of compiled programs.
    told = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE")
    environment = {key: os.environ[key] for key in os.environ if key not in told}
    environment["PYTHONPATH"] = os.pathsep.join(str(TESTS / name) for name in FOLDERS)
    with contextlib.ExitStack() as stack:
        programs = []
        for arguments in each:
            # A file, since a pipe that nobody reads would block the program.
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            program = subprocess.Popen(
                [sys.executable, *WARNINGS, "-c", code, *arguments],
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
