"""Trains with a loss of your own, without changing the packages.

    python examples/own_loss.py --logdir logdir/smooth

All flags of `dreamerv3` may follow, such as the weight of the loss:
`--agent.loss_scales.smooth 0.1`.
"""

import functools
import sys

import jax.numpy as jnp

import dreamerv3
import embodied
from dreamerv3 import main
from dreamerv3.cli.config import make_args
from dreamerv3.cli.factories import make_spaces
from dreamerv3.cli.logdir import prepare_logdir

SETTINGS = """--configs cartpole --agent.loss_scales.smooth 0.01"""


class SmoothAgent(dreamerv3.Agent):
    """Prefers recurrent states that change little from step to step."""

    @staticmethod
    def extra_losses(params, states, data):
        """Returns losses [B, T] by name.

        Args:
          params: the networks: `enc`, `dyn`, `dec`, `rew`, `con`, `pol`, `val`.
          states: `deter` [B, T, D] and `stoch` [B, T, S, C], of replayed steps.
          data: the batch [B, T, ...] by key.
        """
        deter = states["deter"].astype(jnp.float32)
        change = jnp.square(deter[:, 1:] - deter[:, :-1]).mean(-1)
        change = jnp.pad(change, ((0, 0), (1, 0)))
        # The first state of an episode may differ from the one before it.
        return {"smooth": jnp.where(data["is_first"], 0.0, change)}


def make_agent(config):
    return SmoothAgent(*make_spaces(config), config)


def train(argv):
    config = main.load_config([*SETTINGS.split(), *argv])
    prepare_logdir(config)
    embodied.run.train(
        functools.partial(make_agent, config),
        functools.partial(main.make_replay, config, "replay"),
        functools.partial(main.make_env, config),
        functools.partial(main.make_stream, config),
        functools.partial(main.make_logger, config),
        make_args(config),
    )


if __name__ == "__main__":
    train(sys.argv[1:])
