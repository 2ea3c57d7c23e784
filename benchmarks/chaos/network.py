"""Two hosts on one machine: network namespaces with a virtual cable between them."""

from __future__ import annotations

import itertools
import os
import subprocess

_NUMBERS = itertools.count()


class Hosts:
    """The namespaces 'train', which has `address`, and 'env'.

    Each has a loopback interface and one end of the cable, and reaches nothing else.
    They are made by `__enter__`, which raises OSError if that is not allowed.
    """

    address = "10.213.7.1"

    def __init__(self) -> None:
        number = f"{os.getpid() % 100000}{next(_NUMBERS)}"
        self._names = {"train": f"chaost{number}", "env": f"chaose{number}"}
        self._cable = (f"cht{number}", f"che{number}")

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names.values():  # The cable is removed with its ends.
            subprocess.run(
                ["ip", "netns", "del", name], capture_output=True, timeout=30
            )

    def prefix(self, host: str) -> list[str]:
        """Returns the words to put before a command so that it runs on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def connect(self, connected: bool) -> None:
        """Plugs the cable in, or pulls it out: packets are lost without notice."""
        state = "up" if connected else "down"
        _ip("-n", self._names["env"], "link", "set", self._cable[1], state)

    def _make(self) -> None:
        for name in self._names.values():
            _ip("netns", "add", name)
        near, far = self._cable
        train, env = self._names["train"], self._names["env"]
        ends = ("netns", train, "type", "veth", "peer", far, "netns", env)
        _ip("link", "add", near, *ends)
        for host, end, address in (
            (train, near, self.address),
            (env, far, "10.213.7.2"),
        ):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", host, "link", "set", end, "up")
            _ip("-n", host, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
