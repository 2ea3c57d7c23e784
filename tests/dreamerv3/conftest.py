"""Fixtures for tests that load policies."""

import functools

import pytest


@pytest.fixture(scope="module")
def quick_policies():
    """Compiles policies of checkpoints like those of agents in tests."""
    from agent_testing import QUICK

    from dreamerv3.policies import acting_agent

    quick = functools.partial(acting_agent.PolicyRunner, options=QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acting_agent, "PolicyRunner", quick)
        yield
