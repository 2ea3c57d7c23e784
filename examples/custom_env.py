"""Trains on a Gymnasium environment of your own.

    python examples/custom_env.py --logdir logdir/custom

All flags of `dreamerv3` may follow. From this folder, other programs find the
environment by its name too:

    python -m dreamerv3.main --task custom_env:Lights --logdir logdir/custom
    python inference.py logdir/custom
"""

import sys

import gymnasium
import numpy as np

from dreamerv3 import main

# A small agent with a horizon of thirty steps that explores a lot.
SETTINGS = """--task custom_env:Lights --configs cartpole --run.steps 6000
    --agent.horizon 30 --agent.imag_length 8 --agent.imag_loss.actent 1e-2"""


class Lights(gymnasium.Env):
    """Turn off seven lights, which are in a circle. A switch flips two neighbours.

    Three switches at most are needed. The reward is 1 when all lights are off, which
    ends the episode, as do ten steps. A random policy scores 0.11; after a minute or
    two of training on two cores, nearly all episodes are solved.
    """

    observation_space = gymnasium.spaces.Box(0, 1, (7,), np.float32)
    action_space = gymnasium.spaces.Discrete(7)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.lights = np.zeros(7, np.float32)
        for switch in self.np_random.permutation(7)[:3]:
            self.flip(switch)
        return self.lights.copy(), {}

    def step(self, action):
        self.steps += 1
        self.flip(action)
        solved = not self.lights.any()
        return self.lights.copy(), float(solved), solved, self.steps >= 10, {}

    def flip(self, switch):
        for light in (switch, (switch + 1) % 7):
            self.lights[light] = 1 - self.lights[light]


if __name__ == "__main__":
    sys.exit(main.main([*SETTINGS.split(), *sys.argv[1:]]))
