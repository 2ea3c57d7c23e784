"""A TCP proxy that harms the connections it carries. A program of its own.

    python -m benchmarks.chaos.proxy --listen HOST:PORT --to HOST:PORT

While nothing listens at the target, new connections wait: for a client, this looks like
a network that loses packets, without a proxy.

Reads lines `KIND SECONDS` from its standard input, and ends with it:

    cut 2      closes all connections, and answers no new ones for 2 seconds
    stall 3    carries nothing for 3 seconds, and then all of it
    delay 4    carries everything late, by a random part of a second, for 4 seconds
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections.abc import Sequence

RETRY = 0.2  # Seconds between attempts to reach the other side.
LATE = 0.3  # Largest delay of a piece of data, in seconds.


class Proxy:
    """Carries bytes in both directions. Belongs to one event loop."""

    def __init__(self, host: str, port: int, seed: int = 0):
        self._target = host, port
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._until = {"cut": 0.0, "stall": 0.0, "delay": 0.0}

    def harm(self, kind: str, seconds: float) -> None:
        """Begins a harm that ends by itself."""
        self._until[kind] = asyncio.get_running_loop().time() + seconds
        if kind == "cut":
            for writer in list(self._writers):
                writer.transport.abort()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carries one connection until one of its ends closes it."""
        self._writers.add(writer)
        other = None
        try:
            far, other = await self._reach()
            self._writers.add(other)
            pumps = [self._pump(reader, other), self._pump(far, writer)]
            tasks = [asyncio.ensure_future(pump) for pump in pumps]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        finally:
            for end in filter(None, (writer, other)):
                self._writers.discard(end)
                end.close()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to the other side, and retries until that works."""
        while True:
            await asyncio.sleep(self._lasts("cut"))
            with contextlib.suppress(OSError):
                return await asyncio.open_connection(*self._target)
            await asyncio.sleep(RETRY)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                while (left := self._lasts("stall")) > 0:
                    await asyncio.sleep(left)
                if self._lasts("delay"):
                    await asyncio.sleep(self._random.uniform(0, LATE))
                writer.write(data)
                await writer.drain()

    def _lasts(self, kind: str) -> float:
        """Returns for how many seconds a harm will still last."""
        return max(0.0, self._until[kind] - asyncio.get_running_loop().time())


async def run(listen: tuple[str, int], target: tuple[str, int]) -> None:
    """Serves until the standard input ends."""
    proxy = Proxy(*target)
    server = await asyncio.start_server(proxy.serve, *listen)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    async with server:
        while line := await commands.readline():
            kind, seconds = line.decode().split()
            proxy.harm(kind, float(seconds))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the proxy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--to", required=True)
    options = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(_address(options.listen), _address(options.to)))
    return 0


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main())
