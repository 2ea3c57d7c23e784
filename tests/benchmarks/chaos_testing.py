"""Writes logdirs by hand, as documented, for tests of the chaos test's reader."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import safetensors.numpy
import zstandard

from benchmarks.chaos.numbered_env import episode_length, pack, reward_of

TAG = "20261116T023652308396-00000012"
ENV, LIFE = 77, 123456789


def transitions(counters, life=LIFE, env=ENV, **changes):
    """The transitions of a life, as an environment makes them."""
    every, episode = [], 0
    while len(every) <= max(counters):
        length = episode_length(life, episode)
        every += [(episode, step, step == length) for step in range(length + 1)]
        episode += 1
    rows = [(env, life, *every[counter][:2], counter) for counter in counters]
    last = np.array([every[counter][2] for counter in counters])
    return {
        "where": np.stack([pack(row) for row in rows]),
        "reward": np.array([reward_of(life, x) for x in counters], np.float32),
        "is_first": np.array([row[3] == 0 for row in rows]),
        "is_last": last,
        "is_terminal": last,
        **changes,
    }


class Logdir:
    """A logdir with one checkpoint."""

    def __init__(self, folder):
        self.folder = folder
        self.files = []
        self.chunks = {"replay": [], "replay_eval": []}

    def add_chunk(self, name, *pieces, previous=-1, replay="replay"):
        """Adds a chunk whose steps are in several files."""
        identity = hashlib.md5(name.encode()).digest()
        start = 0
        for save, arrays in enumerate(pieces):
            stop = start + len(arrays["where"])
            file = f"{identity.hex()}-{start:08d}-{stop:08d}-{save:08d}.steps"
            data = safetensors.numpy.save(arrays, {"replay": "{}"})
            data = zstandard.ZstdCompressor(1).compress(data)
            self.write(f"{replay}/{file}", data, required=False)
            start = stop
        self.chunks[replay].append((identity, previous, start))

    def commit(self, step=10, updates=5, inserts=10**6):
        """Writes parts and manifest."""
        counters = {"dict": [["inserts", inserts], ["evicted", 0]]}
        for replay, chunks in self.chunks.items():
            arrays = {}
            if chunks:
                arrays["chunks/id"] = np.array([list(x[0]) for x in chunks], np.uint8)
                arrays["chunks/previous"] = np.array([x[1] for x in chunks], np.int32)
                arrays["chunks/steps"] = np.array([x[2] for x in chunks], np.int32)
            self.add_part(replay, {"dict": [["counters", counters]]}, arrays)
        counted = {"dict": [["updates", updates]]}
        self.add_part("agent", {"dict": [["counters", counted]]}, {})
        content = {"format": 1, "tag": TAG, "meta": {"step": step}, "files": self.files}
        for path in ("ckpt/manifest.json", f"ckpt/manifests/{TAG}.json"):
            self.write(path, seal(content), listed=False)
        (self.folder / "config.yaml").write_text("seed: 0\n")
        return self.folder

    def add_part(self, name, tree, arrays):
        data = safetensors.numpy.save(arrays)
        self.write(f"ckpt/{name}/{TAG}.safetensors", data)
        self.write(f"ckpt/{name}/{TAG}.json", seal({"tree": tree}))

    def write(self, path, data, required=True, listed=True):
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        entry = {"path": path, "size": len(data), "digest": digest}
        if listed:
            self.files.append({**entry, "required": required})


def seal(content):
    text = json.dumps(content, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return b'{"digest":"sha256:%s","content":%s}' % (digest, text)
