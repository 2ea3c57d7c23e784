"""Checkpoints: atomic, verified, and loaded without running code. Any process.

A learner conducts one consistent cut over several processes:

    tag = checkpoint.new_tag()
    records = checkpoint.write_part(tag, 'agent', agent.save())   # Here,
    records += replay.save(tag)                                   # and elsewhere.
    checkpoint.commit(tag, records, {'step': step})

A single process does the same in one call, and reads it back at start-up:

    checkpoint.clean()
    if loaded := checkpoint.load():
      parts, meta = loaded
    checkpoint.save({'agent': agent.save()}, {'step': step})

Files, below the root (the logdir):

    ckpt/NAME/TAG.safetensors   the arrays of a part
    ckpt/NAME/TAG.json          its other values, with the digest of the arrays
    ckpt/manifest.json          the newest commit: all files with size and digest
    ckpt/manifests/TAG.json     a copy of each kept commit, the newest included
    ckpt/starts                 how often roles have started, checked by each commit
    ckpt/verified               which files a role has verified, for roles that start

Damaged checkpoints are skipped with a warning that names the file, through the logger
`embodied.checkpoint` of the `logging` module.
"""

from embodied.checkpoint.files import (
    CheckpointError,
    DiskTooSmallError,
    FileRecord,
    write_file,
)
from embodied.checkpoint.reading import Checkpoint
from embodied.checkpoint.store import Cut, Manifest, PartWriter
from embodied.checkpoint.treefiles import load_tree, save_tree

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Cut",
    "DiskTooSmallError",
    "FileRecord",
    "Manifest",
    "PartWriter",
    "load_tree",
    "save_tree",
    "write_file",
]
