"""A fake of Ray, for tests of the driver's decisions.

Nothing happens by itself: a test inspects the calls of actors and answers them.
"""

from __future__ import annotations

import concurrent.futures
import types


class Call:
    """A call of an actor's method, which a test answers."""

    def __init__(self, method, arguments):
        self.method = method
        self.arguments = arguments
        self._future = concurrent.futures.Future()

    def future(self):
        return self._future

    def answer(self, result):
        self._future.set_result(result)

    def fail(self, text, kind="ActorDiedError"):
        self._future.set_exception(type(kind, (Exception,), {})(text))


class Actor:
    def __init__(self, name, options):
        self.name = name
        self.options = options
        self.calls = []
        self.killed = False

    def __getattr__(self, method):
        def remote(*arguments):
            self.calls.append(Call(method, arguments))
            return self.calls[-1]

        return types.SimpleNamespace(remote=remote)


class FakeRay:
    """The part of the module `ray` that a driver uses once it is connected."""

    def __init__(self):
        self.actors = []
        strategies = types.SimpleNamespace(
            PlacementGroupSchedulingStrategy=lambda **given: given
        )
        self.util = types.SimpleNamespace(
            placement_group=lambda bundles, strategy: (bundles, strategy),
            remove_placement_group=lambda group: None,
            scheduling_strategies=strategies,
        )

    def remote(self, kind):
        def options(**given):
            def make(name):
                self.actors.append(Actor(name, given))
                return self.actors[-1]

            return types.SimpleNamespace(remote=make)

        return types.SimpleNamespace(options=options)

    def kill(self, actor):
        actor.killed = True

    def newest(self, name):
        """Returns the newest actor of a bundle; None if there is none."""
        found = [actor for actor in self.actors if actor.name == name]
        return found[-1] if found else None

    def call(self, name, method):
        """Returns the newest call of a method of a bundle's newest actor, or None."""
        actor = self.newest(name)
        calls = [x for x in actor.calls if x.method == method] if actor else []
        return calls[-1] if calls else None
