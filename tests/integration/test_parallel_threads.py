"""Actor and learner as threads of a user's program, joined by a barrier."""

import shutil

import pytest
from parallel_testing import Program, Saved, metrics, shared_addresses, small

# Actor and learner share an agent, as threads of any kind; others are processes.
SCRIPT = """
import sys, threading
import portal
import embodied
from embodied.workers import (Process, stop)
from embodied.run.parallel import *
from tiny_testing import Parts

parts = Parts(sys.argv[1:])
agent, barrier, args = parts.make_agent(), threading.Barrier(2), parts.args
{setup}
processes = [
    Process(parallel_logger, parts.make_logger, args),
    Process(parallel_replay, parts.make_replay, parts.make_replay_eval,
            parts.make_stream, args),
    Process(parallel_env, parts.make_env, 0, args),
    Process(parallel_env, parts.make_env, 1, args),
    Process(parallel_env, parts.make_env_eval, 2, args, True),
]
for process in processes:
    process.start()
try:
    thread = {thread}
    thread.start()
    parallel_learner(agent, barrier, args)
    thread.join()
    print("updates", agent.updates)
finally:
    stop(processes, 10)
"""

KINDS = {
    "portal": "portal.Thread(parallel_actor, agent, barrier, args)",
    "threading": "threading.Thread(target=parallel_actor, args=(agent, barrier, args))",
}


@pytest.fixture(
    scope="module", params=[pytest.param("portal", marks=pytest.mark.slow), "threading"]
)
def finished(request, tmp_path_factory):
    """The logdir of a run that has ended, and what it printed."""
    folder = tmp_path_factory.mktemp(request.param)
    script, logdir = folder / "program.py", folder / "run"
    script.write_text(SCRIPT.format(thread=KINDS[request.param], setup=""))
    argv = small(logdir, *shared_addresses(folder), steps=1000)
    with Program(*argv, script=script) as program:
        assert program.wait() == 0, program.output()
        return logdir, program.output()


def test_threads_of_a_program(finished):
    logdir, shown = finished
    assert "Traceback" not in shown
    saved = Saved(logdir)
    assert saved.step >= 1000
    assert f"updates {saved['agent']['updates']}\n" in shown
    # The run does not wait for the eval env, which may not have ended an episode.
    assert set(metrics(logdir).get("eval_episode/score", [])) <= {15.0}
    assert set(metrics(logdir)["episode/score"]) == {5.0}


def test_the_actor_fails_at_once_with_the_learners_error(finished, tmp_path, addresses):
    setup = """
def fail(*args):
    raise ValueError("cannot be restored")
agent.load = fail
args = args.update(from_checkpoint=args.logdir)
"""
    script, logdir = tmp_path / "program.py", tmp_path / "run"
    shutil.copytree(finished[0], logdir)
    script.write_text(SCRIPT.format(thread=KINDS["threading"], setup=setup))
    with Program(*small(logdir, *addresses, steps=10**9), script=script) as program:
        assert program.wait() == 1, program.output()
        shown = program.output()
    assert "The actor ends because the learner failed" in shown
    assert shown.count("cannot be restored") >= 2
