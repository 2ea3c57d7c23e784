"""Plays episodes with the policy of a run.

    python examples/inference.py logdir/demo
    python examples/inference.py logdir/demo --episodes 5 --greedy

The policy needs neither the replay of the run nor its environments: put an environment
of your own in place of `make_env`. Observations are dicts with the keys of
`policy.obs_space`; `reward`, `is_last` and so on may be left out.
"""

import argparse

import numpy as np

import dreamerv3
from dreamerv3.cli.config import run_config
from dreamerv3.cli.task_origin import find_task_problem
from dreamerv3.main import make_env
from embodied.checkpoint import CheckpointError


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logdir", help="of a run that has a checkpoint")
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--greedy", action="store_true", help="do not sample actions")
    parser.add_argument("--platform", default="auto", help="cpu, cuda or tpu")
    parser.add_argument(
        "--task", help="the task, if it names code and the run is not yours"
    )
    args = parser.parse_args()

    sample = False if args.greedy else None
    try:
        policy = dreamerv3.load(
            args.logdir, platform=args.platform, sample=sample, task=args.task
        )
    except (CheckpointError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"The agent of step {policy.step}")
    print(f"  sees {', '.join(policy.obs_space)}")
    print(f"  decides on {', '.join(policy.act_space)}")

    # The environment that the run was trained in, wrapped as it was there.
    config = run_config(args.logdir)
    if args.task:
        config = config.update(task=args.task)
    elif problem := find_task_problem(args.logdir, config.task):
        parser.exit(1, f"{parser.prog}: {problem}\n")
    env = make_env(config, 0)
    for episode in range(args.episodes):
        score, length = play(env, policy)
        print(f"Episode {episode + 1}: score {score:.4g}, length {length}")
    env.close()


def play(env, policy):
    """Plays one episode; returns the sum of rewards and the number of actions."""
    nothing = {key: np.zeros(x.shape, x.dtype) for key, x in env.act_space.items()}
    obs = env.step({**nothing, "reset": True})
    policy.reset()
    score, length = 0.0, 0
    while not obs["is_last"]:
        action = policy.act(obs)
        obs = env.step({**action, "reset": False})
        score += float(obs["reward"])
        length += 1
    return score, length


if __name__ == "__main__":
    main()
