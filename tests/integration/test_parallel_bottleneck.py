"""The line that names a run's bottleneck, while one role at a time is slow."""

import re

import pytest
from parallel_testing import Program, small

from embodied.run.parallel import bottleneck

ROLES = ("env", "actor", "replay", "transfer", "learner")
QUICK_ROLES = ("replay",)
LINES = 3  # Successive lines that must name the role.
WAIT = 45.0  # Seconds until all roles have reported, and then for the lines.

# Metrics of all roles, which the line needs to compare them.
SHARES = {
    bottleneck.LEARNER_WAITS,
    bottleneck.STREAM_WAITS,
    bottleneck.LIMITED,
    bottleneck.SAMPLING,
    bottleneck.POLICY,
}

# Batches are moved in a thread ahead of the learner, as JAX agents do it.
SCRIPT = """
import sys
import time
import embodied
from embodied import streams
from tiny_testing import CountingAgent, Parts, Task

slow, *argv = sys.argv[1:]
parts = Parts(argv)
make_quick_stream = parts.make_stream

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
    return streams.Map(make_quick_stream(replay, mode), sample)

def sample(batch):
    work("replay")
    return batch

parts.make_env, parts.make_agent, parts.make_stream = Env, Agent, make_stream
embodied.run.parallel.combined(*parts.seven(), parts.args)
"""

# Short sequences, so that training begins soon also where steps are slow.
FLAGS = ["--batch_length", "4", "--run.eval_envs", "0", "--run.report_every", "0"]


@pytest.mark.parametrize(
    "role",
    [
        pytest.param(role, marks=[pytest.mark.slow] * (role not in QUICK_ROLES))
        for role in ROLES
    ],
)
def test_the_slow_role_is_named(tmp_path, role):
    script, logdir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    argv = small(logdir, *FLAGS, steps=10**9)
    with Program(role, *argv, script=script) as program:
        program.wait_for_metrics(logdir, lambda found: set(found) >= SHARES, WAIT)
        before = len(named(program))

        def settled():
            return named(program)[before:][-LINES:] == [role] * LINES

        program.wait_until(settled, WAIT)


def named(program):
    """Returns the roles that the lines printed so far name."""
    return re.findall(r"^Step .* Bottleneck: (\w+): ", program.output(), re.MULTILINE)
