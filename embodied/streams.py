"""Streams of batches that can be saved and restored. Any process that reads data.

Streams wrap one another; the outermost one saves and loads them all. A saved state
holds dicts with string keys, lists, arrays and plain values only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from embodied.base import Array, Stream, Tree

CLOSE_SECONDS = 60.0  # How long Prefetch waits for the source's last item.


class Stateless(Stream):
    """Calls a function for every item. It has no position, so `save` returns None.

    Args:
      source: a function, or an iterator whose items are passed on.
      args, kwargs: arguments of the function.
    """

    def __init__(
        self, source: Callable[..., Any] | Iterator[Any], *args: Any, **kwargs: Any
    ):
        if isinstance(source, Iterator):
            source = source.__next__
        self._function = source
        self._args = args
        self._kwargs = kwargs

    def __next__(self) -> Any:
        return self._function(*self._args, **self._kwargs)

    def save(self) -> None:
        """Returns None: there is no position to keep."""
        return

    def load(self, data: Tree) -> None:
        """Does nothing: there is no position to go to."""


class StreamWrapper(Stream):
    """A stream over other streams: starting and closing it reach its sources."""

    def __init__(self, sources: Sequence[Stream]):
        for source in sources:
            if not all(hasattr(source, x) for x in ("__next__", "save", "load")):
                raise TypeError(
                    f"{type(self).__name__} expected a Stream as its source, got "
                    f"{source!r}. Wrap functions and iterators in Stateless."
                )
        self._sources = tuple(sources)

    def __iter__(self) -> Self:
        for source in self._sources:
            iter(source)
        return self

    def close(self) -> None:
        """Closes the sources."""
        for source in self._sources:
            if hasattr(source, "close"):  # Users' own streams may have none.
                source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _entry(self, data: Tree, key: str) -> Any:
        if not isinstance(data, Mapping) or key not in data:
            found = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(
                f"{type(self).__name__} expected a state with '{key}', got {found}. "
                "The state belongs to a stream that was built differently."
            )
        return data[key]


class Map(StreamWrapper):
    """Applies `fn(item, *args, **kwargs)` to every item of the source."""

    def __init__(
        self, source: Stream, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ):
        super().__init__([source])
        self._source = source
        self._fn = fn
        self._args = args
        self._kwargs = kwargs

    def __next__(self) -> Any:
        return self._fn(next(self._source), *self._args, **self._kwargs)

    def save(self) -> Tree:
        """Returns the source's position."""
        return {"source": self._source.save()}

    def load(self, data: Tree) -> None:
        """Restores the source."""
        self._source.load(self._entry(data, "source"))


class Zip(StreamWrapper):
    """Yields tuples of one item from every source; ends with the shortest source."""

    def __next__(self) -> tuple[Any, ...]:
        # A list first: a generator would turn StopIteration into RuntimeError.
        items = [next(source) for source in self._sources]
        return tuple(items)

    def save(self) -> Tree:
        """Returns the positions of all sources."""
        return {"sources": [source.save() for source in self._sources]}

    def load(self, data: Tree) -> None:
        """Restores all sources."""
        states = self._entry(data, "sources")
        if len(states) != len(self._sources):
            raise ValueError(
                f"Zip expected the states of {len(self._sources)} sources, got "
                f"{len(states)}. Build it with the sources it was saved with."
            )
        for source, state in zip(self._sources, states):
            source.load(state)


class Mixer(StreamWrapper):
    """Draws every item from one of several sources, chosen at random by weight.

    Args:
      sources: streams by name.
      weights: a number of at least zero for each name; they need not sum to one.
      seed: the same seed draws the same order of sources.
    """

    def __init__(
        self,
        sources: Mapping[str, Stream],
        weights: Mapping[str, float],
        seed: int = 0,
    ):
        if set(sources) != set(weights):
            raise ValueError(
                f"Mixer expected one weight per source, got sources {sorted(sources)} "
                f"and weights {sorted(weights)}."
            )
        # Sorted, so that the order in which a dict was filled changes nothing.
        self._names = sorted(sources)
        super().__init__([sources[name] for name in self._names])
        values = np.array([weights[name] for name in self._names], np.float64)
        if not (np.all(np.isfinite(values)) and np.all(values >= 0) and values.any()):
            raise ValueError(
                "Mixer expected finite weights of at least zero, one of them above "
                f"zero, got {dict(weights)}."
            )
        self._chances = values / values.sum()
        self._rng = np.random.default_rng(seed)

    def __next__(self) -> Any:
        index = self._rng.choice(len(self._sources), p=self._chances)
        return next(self._sources[index])

    def save(self) -> Tree:
        """Returns the state of the draws and the positions of all sources."""
        states = {name: s.save() for name, s in zip(self._names, self._sources)}
        return {"rng": dict(self._rng.bit_generator.state), "sources": states}

    def load(self, data: Tree) -> None:
        """Restores the draws and all sources."""
        rng, states = self._entry(data, "rng"), self._entry(data, "sources")
        if sorted(states) != self._names:
            raise ValueError(
                f"Mixer expected the states of sources {self._names}, got "
                f"{sorted(states)}. Build it with the sources it was saved with."
            )
        for name, source in zip(self._names, self._sources):
            source.load(states[name])
        self._rng.bit_generator.state = rng


class Consec(StreamWrapper):
    """Cuts every sample of the source into consecutive chunks.

    With length=3, consec=3, prefix=2, where p marks context and digits the steps
    that belong to a chunk:

        sample    . . 0 0 0 1 1 1 2 2 2     consec * length + prefix steps
        chunk 0   p p 0 0 0
        chunk 1         p p 1 1 1           prefix + length steps each
        chunk 2               p p 2 2 2

    Samples are dicts of arrays [B, consec * length + prefix, ...]. Chunks have the
    same keys and `consec`, the chunk's index: [B, prefix + length] int32.

    A key with only `prefix` time steps belongs to the context of the whole sample,
    such as recurrent states. The first chunk gets it unchanged, the others get zeros
    of its shape.

    Args:
      source: the stream of samples.
      length: steps that belong to each chunk.
      consec: chunks per sample.
      prefix: steps of context before those of each chunk.
      strict: whether samples must have exactly the number of steps needed; otherwise
        extra steps at their end are dropped.
      contiguous: whether chunks are contiguous in memory. By default they are views
        of the sample, and neighbours share their context: do not write to them.
    """

    def __init__(
        self,
        source: Stream,
        length: int,
        consec: int,
        prefix: int = 0,
        strict: bool = True,
        contiguous: bool = False,
    ):
        super().__init__([source])
        if length < 1 or consec < 1 or prefix < 0:
            raise ValueError(
                "Consec expected length >= 1, consec >= 1 and prefix >= 0, got "
                f"length={length}, consec={consec}, prefix={prefix}."
            )
        self._source = source
        self._length = length
        self._consec = consec
        self._prefix = prefix
        self._strict = strict
        self._contiguous = contiguous
        self._sample: dict[str, Array] | None = None
        self._index = 0  # Of the next chunk of the sample.

    def __next__(self) -> dict[str, Array]:
        if self._sample is None:
            sample = next(self._source)
            self._check(sample)
            self._sample, self._index = sample, 0
        chunk = self._cut(self._sample, self._index)
        self._index += 1
        if self._index == self._consec:
            self._sample, self._index = None, 0
        return chunk

    def save(self) -> Tree:
        """Returns the source's position and the sample that is being cut.

        The arrays themselves are kept: the rest of a sequence must come from the same
        sample, which a source without position could not return again.
        """
        sample = None if self._sample is None else dict(self._sample)
        return {"source": self._source.save(), "sample": sample, "index": self._index}

    def load(self, data: Tree) -> None:
        """Continues at the chunk of the sample at which `save` was called."""
        source = self._entry(data, "source")
        sample, index = self._entry(data, "sample"), int(self._entry(data, "index"))
        if sample is not None:
            self._check(sample)
            if not 0 < index < self._consec:
                raise ValueError(
                    f"Consec expected a chunk index between 1 and {self._consec - 1} "
                    f"in a sample's middle, got {index}. The state was saved with "
                    "other settings."
                )
        self._source.load(source)
        self._sample, self._index = sample, index

    def _cut(self, sample: dict[str, Array], index: int) -> dict[str, Array]:
        steps = self._prefix + self._length
        start = index * self._length
        chunk = {}
        for key, value in sample.items():
            if value.shape[1] != self._prefix:
                value = value[:, start : start + steps]
            elif index:
                value = np.zeros_like(value)
            chunk[key] = np.ascontiguousarray(value) if self._contiguous else value
        batch = len(next(iter(sample.values())))
        chunk["consec"] = np.full((batch, steps), index, np.int32)
        return chunk

    def _check(self, sample: dict[str, Array]) -> None:
        """Raises unless the sample can be cut."""
        if not isinstance(sample, dict) or "consec" in sample:
            raise ValueError(
                "Consec expected a dict of arrays without key 'consec', which it adds, "
                f"got {list(sample) if isinstance(sample, dict) else type(sample)}."
            )
        needed = self._consec * self._length + self._prefix
        shapes: dict[str, tuple[int, ...]] = {
            key: getattr(value, "shape", ()) for key, value in sample.items()
        }
        batches = {shape[:1] for shape in shapes.values()}
        steps = [shape[1] if len(shape) > 1 else -1 for shape in shapes.values()]
        whole = [x == needed or (x > needed and not self._strict) for x in steps]
        context = [x == self._prefix > 0 for x in steps]
        if len(batches) == 1 and any(whole) and all(np.logical_or(whole, context)):
            return
        raise ValueError(
            f"Consec expected arrays [B, T, ...] with {'' if self._strict else 'at '}"
            f"{'' if self._strict else 'least '}T={needed} ({self._consec} chunks of "
            f"{self._length} steps and {self._prefix} of context; some keys may have "
            f"only the context's), got shapes {shapes}. The length of replayed "
            "sequences must match the stream's settings."
        )


class Prefetch(StreamWrapper):
    """Fetches items in a background thread, ahead of the reader.

    The thread starts at the first `iter` or `next`. From then on it alone uses the
    source, until `close` or `load` has joined it. `_changed` guards everything that
    the thread and the reader share.

    Saving returns the position of the next item that the reader has not received,
    however many were fetched ahead: each is queued with the source's state after it.
    An error of the source, including its end, reaches the reader after the items
    before it, and again at every later `next`. After `close`, only `load` restarts it.

    Args:
      source: the stream to read.
      transform: a pure function of an item, which runs in the thread.
      amount: maximum number of items that wait for the reader.
    """

    def __init__(
        self,
        source: Stream,
        transform: Callable[[Any], Any] | None = None,
        amount: int = 1,
    ):
        super().__init__([source])
        if amount < 1:
            raise ValueError(f"Prefetch expected amount >= 1, got {amount}.")
        self._source = source
        self._transform = transform
        self._amount = amount
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._ready: deque[tuple[Any, Tree]] = deque()  # Items, states after them.
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._closed = False
        self._position: Tree = None  # Of the reader, once the thread has started.

    def __iter__(self) -> Self:
        self._start()
        return self

    def __next__(self) -> Any:
        self._start()
        with self._changed:
            # The thread ends by an error or because of `close`, so this wait ends.
            self._changed.wait_for(lambda: self._ready or self._error or self._closed)
            self._check_open()
            if not self._ready:
                assert self._error is not None
                # Reset the traceback, which would otherwise grow with every call.
                raise self._error.with_traceback(self._traceback)
            item, self._position = self._ready.popleft()
            self._changed.notify_all()
        return item

    def save(self) -> Tree:
        """Returns the position of the next item that the reader has not received."""
        with self._changed:
            started = self._thread is not None
            return {"source": self._position if started else self._source.save()}

    def load(self, data: Tree) -> None:
        """Drops items that were fetched ahead, and moves to the saved position."""
        state = self._entry(data, "source")
        self._stop()
        self._source.load(state)
        self._ready.clear()
        self._thread = self._error = self._traceback = self._position = None
        self._closed = False

    def close(self) -> None:
        """Ends the thread, which completes at most one `next` of the source."""
        try:
            self._stop()
        finally:
            super().close()

    def _start(self) -> None:
        with self._changed:
            self._check_open()
            if self._thread is None:
                self._position = self._source.save()
                # A daemon, so that a program whose reader failed exits without `close`.
                self._thread = threading.Thread(
                    target=self._fetch, name="prefetch", daemon=True
                )
                self._thread.start()

    def _stop(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"Prefetch waited {CLOSE_SECONDS:.0f} s for the source to return "
                    "its next item. Let the source's `next` fail or return sooner."
                )

    def _fetch(self) -> None:
        """Runs in the thread: fills the queue until there is an error or a stop."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closed or len(self._ready) < self._amount
                    )
                    if self._closed:
                        return
                item = next(self._source)
                state = self._source.save()
                if self._transform:
                    item = self._transform(item)
                with self._changed:
                    self._ready.append((item, state))
                    self._changed.notify_all()
                del item, state  # Only the reader keeps them alive from here on.
        except BaseException as error:
            # Every error must reach the reader, which would otherwise wait for ever.
            with self._changed:
                self._error, self._traceback = error, error.__traceback__
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Prefetch is closed. Only `load` starts it again.")
