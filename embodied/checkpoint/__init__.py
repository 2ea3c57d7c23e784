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
    ckpt/NAME/TAG.json          the rest of it, with the digest of its arrays
    ckpt/manifest.json          the newest commit: all files with size and digest
    ckpt/manifests/TAG.json     the commits that are kept, the newest included
    ckpt/starts, verified       what roles note for each other when they start

What is damaged is skipped with a warning that names the file, through the logger
`embodied.checkpoint` of the `logging` module.
"""

from embodied.checkpoint.files import (
    CheckpointError,
    DiskTooSmallError,
    FileRecord,
    write_file,
)
from embodied.checkpoint.manifest import Manifest
from embodied.checkpoint.store import Checkpoint
from embodied.checkpoint.treefiles import load_tree, save_tree

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DiskTooSmallError",
    "FileRecord",
    "Manifest",
    "load_tree",
    "save_tree",
    "write_file",
]
