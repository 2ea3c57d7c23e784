"""Processes that train one agent together do what one process does alone."""

import numpy as np
import pytest
from dreamer_testing import make_agent, train_rounds
from program_testing import run_programs

from embodied.rpc import free_port

ROWS, ROUNDS, HOSTS = 4, 3, 2
# Makes updates far larger than differences by rounding, those of the policy included:
# if rewards and values were predicted as zero, as at the start of a run, its gradients
# would be rounding errors, which the optimiser scales up.
FLAGS = (
    *("--agent.opt.lr", "1e-3", "--agent.opt.warmup", "1"),
    *("--agent.slowvalue.rate", "0.5"),
    *("--agent.rewhead.outscale", "1.0", "--agent.value.outscale", "1.0"),
)
PREDICTED = {f"metrics:{name}" for name in ("rew", "val", "slowval", "tar", "adv")}

HOST = f"""
import sys
file, address, replica, *flags = sys.argv[1:]
from embodied.jax.setup import setup
setup('cpu', coordinator_address=address, replica=int(replica), replicas={HOSTS})
import dreamer_testing, numpy as np
flags += ['--replicas', '{HOSTS}', '--replica', replica]
agent = dreamer_testing.make_agent(*flags, '--jax.coordinator_address', address)
np.savez(file, **dreamer_testing.train_rounds(agent, {ROUNDS}, {ROWS}))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_equal_one(tmp_path):
    address = f"localhost:{free_port()}"
    files = [str(tmp_path / f"{replica}.npz") for replica in range(HOSTS)]
    each = [(file, address, str(i), *FLAGS) for i, file in enumerate(files)]
    run_programs(HOST, each)
    found = []
    for file in files:
        with np.load(file) as arrays:
            found.append({key: arrays[key] for key in arrays})
    agent = make_agent(*FLAGS)
    before = agent.save()["params"]
    single = train_rounds(agent, ROUNDS, ROWS)
    for name, value in before.items():
        moved = np.abs(single[f"params:{name}"] - value).max()
        # Values are zero at first, and so are returns: their statistics move less.
        assert moved > (0 if name.startswith("retnorm/") else 1e-4), name
    for key, value in single.items():
        rows = np.split(value, HOSTS) if key.startswith("replay:") else [value] * HOSTS
        # Predicted values are small differences of products with bins up to 5e8.
        atol = 1e-4 if key in PREDICTED else 1e-6
        for arrays, expected in zip(found, rows):
            np.testing.assert_allclose(
                arrays[key], expected, rtol=1e-5, atol=atol, err_msg=key
            )
