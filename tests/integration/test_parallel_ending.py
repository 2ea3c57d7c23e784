"""How a parallel run ends: by steps, time, signals, and failures of roles."""

import re
import signal
import time

import pytest
from parallel_testing import LEAN, Program, Saved, metrics, small

from dreamerv3.main import main
from embodied.workers.child import STOP

# The command line with an agent, or an environment, of the test.
SCRIPT = """
import sys, threading
from dreamerv3 import main
from dreamerv3.cli import scripts
from tiny_testing import CountingAgent, Task

{body}

sys.exit(main.main(sys.argv[1:]))
"""

HANGING = """
class Hanging(CountingAgent):
    saves = 0

    def save(self):
        self.saves += 1
        if self.saves > 1:
            print("hanging", flush=True)
            threading.Event().wait()
        return super().save()

scripts.make_agent = lambda config, spaces: Hanging()
"""

SLOW_TO_SAVE = """
import time

class SlowToSave(CountingAgent):
    def save(self):
        time.sleep(1)
        return super().save()

scripts.make_agent = lambda config, spaces: SlowToSave()
"""

FAILING = """
def fail(*args):
    raise OSError("the disk is on fire")

class Failing(CountingAgent):
    {method} = fail

scripts.make_agent = lambda config, spaces: Failing()
"""

FAILING_ONCE = """
import pathlib

class FailingOnce(CountingAgent):
    def {method}(self, *args):
        fault = pathlib.Path({fault!r})
        if self.updates >= 20 and fault.exists():
            fault.unlink()
            raise OSError("the device was away for a moment")
        return super().{method}(*args)

scripts.make_agent = lambda config, spaces: FailingOnce()
"""


MISTAKEN = """
from dreamerv3.cli.config import ConfigError

def fail(*args):
    raise ConfigError("this can never work")

scripts.make_agent = fail
"""

SILENT_ONCE = """
import pathlib
from embodied.rpc import server

made = scripts.make_replay

def make_replay(*args):
    fault = pathlib.Path({fault!r})
    if fault.exists():
        fault.unlink()
        server.Server._due = lambda self: 1 // 0  # In the replay's process alone.
    return made(*args)

scripts.make_replay = make_replay
scripts.make_agent = lambda config, spaces: CountingAgent()
"""


def write_script(folder, body):
    path = folder / "program.py"
    path.write_text(SCRIPT.format(body=body))
    return path


def test_it_ends_after_the_duration(tmp_path):
    begin = time.monotonic()
    argv = small(tmp_path, *LEAN, "--run.duration", "10", steps=10**9)
    with Program(*argv) as program:
        assert program.wait() == 0, program.output()
        assert f"Written to {tmp_path}:" in program.output()
    assert time.monotonic() - begin >= 10
    assert Saved(tmp_path).step >= 0


@pytest.mark.parametrize(
    ("number", "own_process"),
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow),
    ],
)
def test_one_signal_saves_and_ends_well(tmp_path, number, own_process):
    argv = [*LEAN, "--run.agent_process", own_process]
    with Program(*small(tmp_path, *argv, steps=10**9)) as program:
        program.wait_for_step(tmp_path, 100)
        assert ("agent" in program.roles()) == own_process
        children = program.children()
        program.interrupt() if number == signal.SIGINT else program.terminate()
        assert program.wait() == 0, program.output()
        assert not [child for child in children if child.is_running()]
        shown = program.output()
    assert "Traceback" not in shown and "WARNING" not in shown
    assert "Interrupted: saving, then leaving. Ctrl-C again leaves now." in shown
    saved = Saved(tmp_path)
    assert saved.step >= 100
    assert re.search(f"Done in .* s, at step {saved.step},", shown)
    assert metrics(tmp_path)["step"][-1] >= saved.step


def test_a_signal_to_every_process_saves_and_ends_well(tmp_path):
    script = write_script(tmp_path, SLOW_TO_SAVE)
    argv = small(tmp_path, *LEAN, "--run.agent_process", "True", steps=10**9)
    with Program(*argv, script=script) as program:
        program.wait_for_step(tmp_path, 100)
        roles = program.roles()
        assert roles.keys() > {"agent", "replay", "logger"}
        for role in roles.values():  # As a host that shuts down does.
            role.terminate()
        program.terminate()
        assert program.wait() == 0, program.output()
        shown = program.output()
    assert "WARNING" not in shown and "Traceback" not in shown
    assert Saved(tmp_path).step >= 100


def test_the_second_interrupt_ends_it_at_once(tmp_path):
    script = write_script(tmp_path, HANGING)
    argv = small(tmp_path, *LEAN, steps=10**9)
    with Program(*argv, script=script) as program:
        program.wait_for_step(tmp_path, 100)
        program.interrupt()
        program.wait_for("hanging")
        children = program.children()
        assert program.running and children
        program.interrupt()
        begin = time.monotonic()
        assert program.wait() == 130, program.output()
        assert time.monotonic() - begin < 8
        assert not [child for child in children if child.is_running()]
        assert "interrupted, without saving" in program.output()
    assert Saved(tmp_path).step == 0


@pytest.mark.parametrize(
    ("body", "role"),
    [
        pytest.param(FAILING.format(method="train"), "agent", marks=pytest.mark.slow),
        (FAILING.format(method="policy"), "agent"),
        pytest.param(FAILING.format(method="save"), "agent", marks=pytest.mark.slow),
        (FAILING.format(method="load = None; __init__"), "agent"),
        pytest.param(
            FAILING.format(method="_") + "scripts.EnvFactory = lambda *args: fail",
            "env",
            marks=pytest.mark.slow,
        ),
        (FAILING.format(method="_") + "scripts.make_replay = fail", "replay"),
        pytest.param(
            FAILING.format(method="_") + "scripts.make_logger = fail",
            "logger",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["train", "policy", "save", "make_agent", "env", "replay", "logger"],
)
def test_a_failure_names_the_role_with_its_traceback(tmp_path, body, role):
    script = write_script(tmp_path, body)
    never = [f"--run.restarts.{name}" for name in ("env", "replay", "logger", "agent")]
    never = [part for name in never for part in (name, "0")]
    with Program(*small(tmp_path, *LEAN, *never), script=script) as program:
        assert program.wait() == 1, program.output()
        shown = program.output()
    _, found, message = shown.partition("dreamerv3: Worker '")
    assert found, shown
    assert message.startswith(f"{role}-" if role == "env" else f"{role}' ")
    assert f"of role '{role}' failed for good" in message
    assert "OSError: the disk is on fire" in message
    assert 'raise OSError("the disk is on fire")' in message or "in fail" in message
    assert shown.count("Traceback") == 1, "of the role alone, not of the launcher"


def test_a_failure_of_the_agent_process_is_told(tmp_path):
    script = write_script(tmp_path, FAILING.format(method="train"))
    argv = ["--run.agent_process", "True", "--run.restarts.agent", "0"]
    with Program(*small(tmp_path, *LEAN, *argv), script=script) as program:
        assert program.wait() == 1, program.output()
        shown = program.output()
    assert "Worker 'agent' of role 'agent' failed for good" in shown
    assert "OSError: the disk is on fire" in shown


def test_a_mistake_is_not_made_again_by_an_agent_process(tmp_path):
    script = write_script(tmp_path, MISTAKEN)
    argv = ["--run.agent_process", "True", "--run.restarts.agent", "1000"]
    with Program(*small(tmp_path, *LEAN, *argv), script=script) as program:
        assert program.wait() == 2, program.output()
        shown = program.output()
    assert "this can never work" in shown and "is restarted" not in shown


def test_a_save_that_fails_on_the_way_ends_the_run_with_its_error(tmp_path):
    fault, logdir = tmp_path / "fault", tmp_path / "run"
    fault.touch()
    body = FAILING_ONCE.format(method="save", fault=str(fault))
    argv = small(logdir, *LEAN, "--run.save_every", "0.2", steps=10**9)
    with Program(*argv, script=write_script(tmp_path, body)) as program:
        assert program.wait() == 1, program.output()
        assert "OSError: the device was away for a moment" in program.output()


@pytest.mark.slow
def test_a_role_whose_server_falls_silent_is_restarted(tmp_path):
    fault, logdir = tmp_path / "fault", tmp_path / "run"
    fault.touch()
    body = SILENT_ONCE.format(fault=str(fault))
    with Program(*small(logdir), script=write_script(tmp_path, body)) as program:
        assert program.wait() == 0, program.output()
        assert program.output().count("Role replay is restarted") == 1


@pytest.mark.parametrize(
    "method", ["train", pytest.param("policy", marks=pytest.mark.slow)]
)
def test_env_workers_wait_for_an_agent_that_comes_back(tmp_path, method):
    fault, logdir = tmp_path / "fault", tmp_path / "run"
    fault.touch()
    body = FAILING_ONCE.format(method=method, fault=str(fault))
    argv = small(logdir, "--run.agent_process", "True", steps=600)
    with Program(*argv, script=write_script(tmp_path, body)) as program:
        assert program.wait() == 0, program.output()
        shown = program.output()
    assert shown.count("Role agent is restarted: failed with OSError") == 1
    # Workers that waited for the policy may have received its error.
    assert "Role env-" not in shown or method == "policy"
    assert Saved(logdir).step >= 600


def test_a_batch_that_would_never_be_full_is_refused(tmp_path, capfd):
    logdir = tmp_path / "run"
    assert main(small(logdir, "--run.actor_batch", "3")) == 2
    shown = "".join(capfd.readouterr())
    assert "actor_batch" in shown and "run.envs" in shown
    assert "Traceback" not in shown
    assert not logdir.exists()


def test_a_task_that_does_not_exist_is_refused(tmp_path, capfd):
    assert main(small(tmp_path, "--task", "dummy_dics")) == 2
    shown = "".join(capfd.readouterr())
    assert "disc?" in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    "role", [pytest.param("logger", marks=pytest.mark.slow), "replay"]
)
def test_a_role_that_somebody_ends_comes_back(tmp_path, role):
    def count():
        # No lines are left if the logger went back to its first checkpoint.
        return len(metrics(tmp_path).get("step", ()))

    with Program(*small(tmp_path, *LEAN, steps=10**9)) as program:
        program.wait_for_step(tmp_path, 100)
        first = program.roles()[role]
        first.send_signal(STOP)
        program.wait_for(f"Role {role} is restarted: it ended.")
        program.wait_until(lambda: program.roles().get(role, first) != first)
        lines = count()
        program.wait_until(lambda: count() > lines + 20)
        assert program.running, program.output()
        program.interrupt()
        assert program.wait() == 0, program.output()


def test_a_run_that_has_made_its_steps_is_not_continued(tmp_path):
    shown = []
    for _ in range(2):
        with Program(*small(tmp_path, *LEAN, steps=100)) as program:
            assert program.wait() == 0, program.output()
            shown.append((Saved(tmp_path).tag, Saved(tmp_path).step))
            again = program.output()
    assert "made its 100 steps already" in again
    assert shown[0] == shown[1]


@pytest.mark.slow
def test_a_restarted_agent_has_what_is_left_of_the_duration(tmp_path):
    argv = [*LEAN, "--run.agent_process", "True", "--run.duration", "30"]
    with Program(*small(tmp_path, *argv, steps=10**9)) as program:
        time.sleep(25)
        killed = time.monotonic()
        program.roles()["agent"].kill()
        assert program.wait() == 0, program.output()
    assert time.monotonic() - killed < 28
