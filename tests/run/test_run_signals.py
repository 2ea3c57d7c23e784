"""Signals and kills of a real training process, which then continues.

The tests run this file as their child process.
"""

from __future__ import annotations

import json
import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from loop_testing import LENGTH
from run_testing import Parts, main, newest_step

from embodied.run import console
from embodied.run.console import stop_on_signals
from embodied.workers import Process


def start(logdir, **changes):
    command = [sys.executable, __file__, str(logdir)]
    command += [json.dumps(change) for change in changes.items()]
    # Unbuffered, so that `select` sees every line that was not read yet.
    return subprocess.Popen(
        command,
        bufsize=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def wait_for_line(process, seconds=60):
    """Returns the next line that the script itself prints."""
    while True:
        assert select.select([process.stdout], [], [], seconds)[0], "no line in time"
        line = process.stdout.readline().decode()
        if not line.startswith(("Saved step", "Continuing at step")):
            return line


def read_steps(logdir):
    lines = (logdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_well(tmp_path, number, debug):
    with start(tmp_path, steps=1e10, say_every=100, debug=debug) as process:
        assert wait_for_line(process) == "step 100\n"
        process.send_signal(number)
        shown, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.decode()) == (0, "")
    step = newest_step(tmp_path)
    assert step >= 100
    assert shown.decode().splitlines()[-1] == f"ended at step {step}"
    assert read_steps(tmp_path)[-1] == step, "what was measured last is logged"
    assert Parts(tmp_path, steps=step + 10, envs=2).train().steps == 10


def test_two_interrupts_count_even_if_python_could_handle_neither():
    code = (
        "from embodied.run.console import stop_on_signals\n"
        "with stop_on_signals():\n"
        "    print('busy', flush=True)\n"
        "    sum(range(10**8))\n"  # One call: no handler is called before its end.
        "print('unharmed')\n"
    )
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "busy\n"
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)  # The system counts signals once that come together.
        shown, errors = process.communicate(timeout=60)
    assert "unharmed" not in shown
    assert errors.endswith("KeyboardInterrupt\n")


def test_a_signal_that_is_sent_twice_at_once_counts_once():
    # `timeout` sends it to the process, and to the group of the process. Here, both
    # come within one call, so that Python can handle neither before the other.
    code = (
        "import ctypes, os\n"
        "from embodied.run.console import stop_on_signals\n"
        "kill = ctypes.CDLL(None).kill\n"
        "with stop_on_signals() as stop:\n"
        f"    list(map(kill, [os.getpid()] * 2, [{int(signal.SIGTERM)}] * 2))\n"
        "    told = stop.wait(30)\n"
        "print('saved', told)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "saved True\n"), done.stderr


def test_a_second_interrupt_ends_it_at_once(tmp_path):
    with start(tmp_path, steps=1e10, hang_at=50) as process:
        assert wait_for_line(process) == "hanging\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=30)[1].decode()
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in errors
    assert newest_step(tmp_path) == 0


@pytest.mark.parametrize(
    "rounds", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_killed_at_any_moment_it_continues_from_the_last_save(tmp_path, rounds):
    moments = random.Random(rounds)
    saved, progress = 0, 0
    for index in range(rounds):
        early = index % 3 == 1  # Killed while it starts and restores.
        with start(tmp_path, steps=1e10, save_every=0.05, say_every=60) as process:
            try:
                if not early:
                    line = wait_for_line(process)
                    assert line == f"step {saved + 60}\n", "60 steps after the save"
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(moments.uniform(0, 0.8))
                before = newest_step(tmp_path)
            finally:
                process.kill()
            assert process.stderr.read() == b""
        assert saved <= (before or 0) <= (newest_step(tmp_path) or 0)
        saved = newest_step(tmp_path) or 0
        progress += not early
    parts = Parts(tmp_path, steps=saved)
    parts.train()
    assert int(parts.logger.step) == saved >= 60 * progress // 2
    assert parts.replay.stats()["total_inserts"] == saved
    assert parts.agent.updates > 0
    where = parts.replay.sample(500)["where"].astype(int)
    positions = where[..., 1] * (LENGTH + 1) + where[..., 2]
    assert (np.diff(positions, axis=1) == 1).all(), "no sequence spans a kill"
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


class TestStopOnSignals:
    def test_the_first_sets_the_event_and_the_second_acts_as_usual(self):
        with stop_on_signals() as stop:
            assert not stop.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(10)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)

    def test_the_second_acts_as_usual_where_a_shell_has_it_ignored(self):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with stop_on_signals() as stop:
                os.kill(os.getpid(), signal.SIGINT)
                assert stop.wait(10)
                with pytest.raises(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(10)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    def test_the_note_is_printed_at_once(self, capfd):
        with stop_on_signals("saving") as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wait(10)
            assert capfd.readouterr().out == "\nsaving\n"

    def test_one_that_comes_just_before_a_wait_is_not_lost(self, monkeypatch):
        # A timer's signal is precise enough to come between the moment in which the
        # interpreter looks for signals and the wait; a busy thread makes that longer.
        monkeypatch.setitem(console._USUAL, signal.SIGALRM, signal.SIG_DFL)
        ended, stopped = threading.Event(), queue.SimpleQueue()
        moments = random.Random(0)

        def be_busy():
            while not ended.is_set():
                pass

        def tell(stop):
            if stop.wait(60):
                stopped.put(None)

        threads = [threading.Thread(target=be_busy)]
        threads[0].start()
        try:
            for _ in range(50):
                with stop_on_signals() as stop:
                    threads.append(threading.Thread(target=tell, args=[stop]))
                    threads[-1].start()
                    signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 6e-5))
                    stopped.get(timeout=20)
        finally:
            ended.set()
            for thread in threads:
                thread.join()

    @pytest.mark.parametrize("shielded", [False, True])
    def test_a_shielded_process_heeds_its_parent_alone(self, shielded):
        seconds = 0.2 if shielded else 60.0

        def work(fd):
            from embodied.run.console import stop_on_signals

            with stop_on_signals() as stop:
                os.kill(os.getpid(), signal.SIGTERM)
                os.write(fd, b"heeded" if stop.wait(seconds) else b"ignored")
                stop.wait()

        reads, writes = os.pipe()
        process = Process(work, writes, fds=[writes], shielded=shielded, start=True)
        with process:
            assert os.read(reads, 10) == (b"ignored" if shielded else b"heeded")
            process.terminate()
            assert process.join(60)
            # The second signal that counts ends it.
            assert process.exitcode == (0 if shielded else -signal.SIGTERM)
        os.close(reads)
        os.close(writes)

    def test_inside_another_the_second_reaches_the_outer_one(self):
        with stop_on_signals() as outer:
            with stop_on_signals() as inner:
                os.kill(os.getpid(), signal.SIGINT)
                assert inner.wait(10)
                assert not outer.is_set()
                os.kill(os.getpid(), signal.SIGINT)
                assert outer.wait(10)

    def test_handlers_are_as_before_at_the_end(self):
        before = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
        with stop_on_signals():
            assert signal.getsignal(signal.SIGTERM) != before[1]
        after = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
        assert before == after


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
