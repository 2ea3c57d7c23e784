"""The line that names a run's bottleneck, while one role at a time is slow."""

import re

import pytest
from parallel_testing import Program, small, wait_until

from embodied.run.parallel import bottleneck

ROLES = ("env", "actor", "replay", "transfer", "learner")
LINES = 3  # That must name the role, one after the other.
WAIT = 60.0  # Seconds for them; about four are needed.
SHARES = {  # Without which the line is a guess.
    bottleneck.LEARNER_WAITS,
    bottleneck.STREAM_WAITS,
    bottleneck.LIMITED,
    bottleneck.SAMPLING,
    bottleneck.POLICY,
}

# One process for each env; batches are moved in a thread, as those of JAX agents are.
SCRIPT = """
import sys
import time
import embodied
from embodied import streams
from tiny_testing import CountingAgent, Parts, Task

slow, *argv = sys.argv[1:]
parts = Parts(argv)

def work(role):
    if role == slow:
        time.sleep(0.1)

class Env(Task):
    def step(self, action):
        work("env")
        return super().step(action)

class Agent(CountingAgent):
    def policy(self, carry, obs, mode="train"):
        work("actor")
        return super().policy(carry, obs, mode)

    def train(self, carry, batch):
        work("learner")
        return super().train(carry, batch)

    def stream(self, source):
        return streams.Prefetch(source, transform=move, amount=2)

def move(batch):
    work("transfer")
    return batch

def make_stream(replay, mode):
    return streams.Map(parts.make_stream(replay, mode), sample)

def sample(batch):
    work("replay")
    return batch

parts.make_env, parts.make_agent = Env, Agent
factories = list(parts.seven())
factories[5] = make_stream
embodied.run.parallel.combined(*factories, parts.args)
"""

FLAGS = ["--run.eval_envs", "0", "--run.report_every", "0"]


@pytest.mark.parametrize("role", ROLES)
def test_the_slow_role_is_named(tmp_path, role):
    script, logdir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    argv = small(logdir, *FLAGS, steps=10**9)
    with Program(role, *argv, script=script) as program:
        program.wait_for_metrics(logdir, lambda found: set(found) >= SHARES)
        before = len(named(program))
        wait_until(
            lambda: (
                named(program)[before:][-LINES:] == LINES * [role]
                or not program.running
            ),
            WAIT,
            program,
        )
        assert program.running, program.output()


def named(program):
    """The roles that the lines so far name."""
    return re.findall(r"Step \d+, \d+ steps/s\. Bottleneck: (\w+): ", program.output())
