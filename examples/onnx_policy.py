"""Plays a Gymnasium environment with an exported policy and ONNX Runtime alone.

    python -m dreamerv3.export logdir/demo policies/demo --format onnx
    python examples/onnx_policy.py policies/demo CartPole-v1

It needs numpy, onnxruntime and the environment, but neither JAX nor this package.
"""

import argparse
import json
import pathlib

import gymnasium
import numpy as np
import onnxruntime


class Policy:
    """Acts in one environment; call `reset` when an episode begins."""

    def __init__(self, folder, seed=0):
        folder = pathlib.Path(folder)
        self.signature = json.loads((folder / "policy.json").read_text())
        self.session = onnxruntime.InferenceSession(folder / "policy.onnx")
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.first = True
        self.carry = {
            name: self.zeros(name)
            for name in self.signature["inputs"]
            if name.startswith("carry/")
        }

    def act(self, obs):
        """Returns the action by key for an observation by key."""
        inputs = {**self.carry, **self.noise(), "obs/is_first": np.array([self.first])}
        for key, value in obs.items():
            like = self.zeros(f"obs/{key}")
            inputs[f"obs/{key}"] = np.asarray(value, like.dtype).reshape(like.shape)
        names = list(self.signature["outputs"])
        outputs = dict(zip(names, self.session.run(names, inputs)))
        self.first = False
        actions = {}
        for name, value in outputs.items():
            kind, _, key = name.partition("/")
            if kind == "next":
                self.carry[f"carry/{key}"] = value
            else:
                self.carry[f"carry/action/{key}"] = value
                actions[key] = value[0]
                if value.dtype.kind == "f":
                    actions[key] = np.clip(value[0], -1, 1)
        return actions

    def noise(self):
        """Returns Gumbel noise for states and discrete actions, normal for others."""
        noise = {}
        for name in self.signature["inputs"]:
            if not name.startswith("noise/"):
                continue
            shape = self.zeros(name).shape
            space = self.signature["act_space"].get(name.removeprefix("noise/action/"))
            normal = space is not None and space["dtype"].startswith("float")
            draw = self.rng.standard_normal if normal else self.rng.gumbel
            noise[name] = draw(size=shape).astype(np.float32)
        return noise

    def zeros(self, name):
        form = self.signature["inputs"][name]
        return np.zeros([1, *form["shape"][1:]], form["dtype"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="written with --format onnx")
    parser.add_argument("env", help="id that is registered with Gymnasium")
    parser.add_argument("--episodes", type=int, default=1)
    args = parser.parse_args()
    policy, env = Policy(args.folder), gymnasium.make(args.env)
    for episode in range(args.episodes):
        obs, _ = env.reset(seed=episode)
        policy.reset()
        score, done = 0.0, False
        while not done:
            obs, reward, ended, cut, _ = env.step(policy.act({"obs": obs})["action"])
            score, done = score + float(reward), ended or cut
        print(f"Episode {episode + 1}: score {score:.4g}")


if __name__ == "__main__":
    main()
