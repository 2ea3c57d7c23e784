"""The table of policy carries, compared with a simple model."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from role_testing import CountingAgent

from embodied.run.parallel.carries import HostTable, Slots, make_table

ENVS = st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["step", "step", "free"]), ENVS))


class Model:
    """Remembers a count for each env; all are forgotten when there are too many."""

    def __init__(self, room):
        self.room = room
        self.counts = {}

    def step(self, envids):
        missing = [envid for envid in envids if envid not in self.counts]
        if len(self.counts) + len(missing) > self.room:
            self.room = 2 * (len(self.counts) + len(missing))
            self.counts, missing = {}, envids
        for envid in envids:
            self.counts[envid] = self.counts.get(envid, 0) + 1
        return [self.counts[x] for x in envids], [x in missing for x in envids]

    def free(self, envids):
        for envid in envids:
            self.counts.pop(envid, None)


@given(st.integers(0, 5), OPERATIONS)
def test_slots_and_table_agree_with_the_model(room, operations):
    table = HostTable(CountingAgent())
    slots, model = Slots(table, room), Model(room)
    for name, envids in operations:
        if name == "free":
            slots.free(envids)
            model.free(envids)
        else:
            found, new = slots.find(envids)
            assert len(set(found.tolist())) == len(envids)
            obs = {"is_first": np.zeros(len(envids), bool)}
            actions, outputs = table.policy_table(found, obs, "train", envids)
            slots.done(found)
            assert (actions["action"].tolist(), new.tolist()) == model.step(envids)
            assert (outputs["dyn/deter"] == 10 * actions["action"]).all()
        assert len(slots) == len(model.counts)


@given(st.integers(0, 5), OPERATIONS)
def test_no_slot_has_two_envs_in_steps_at_the_same_time(room, operations):
    table = HostTable(CountingAgent())
    slots, open_steps = Slots(table, room), []
    for name, envids in operations:
        if name == "free":
            slots.free(envids)
            continue
        busy = {slot: envid for step in open_steps for slot, envid in step.items()}
        found, _ = slots.find(envids)
        for slot, envid in zip(found.tolist(), envids):
            assert busy.get(slot, envid) == envid
        open_steps.append(dict(zip(found.tolist(), envids)))
        if len(open_steps) == 3:
            slots.done(np.array(list(open_steps.pop(0))))


def test_a_slot_that_was_freed_in_a_step_is_reset_after_it():
    table = HostTable(CountingAgent())
    slots = Slots(table, 1)
    found, _ = slots.find([1])
    slots.free([1])
    table.policy_table(found, {"is_first": np.zeros(1, bool)}, "train", [1])
    slots.done(found)
    again, new = slots.find([2])
    assert (again.tolist(), new.tolist()) == (found.tolist(), [True])
    actions, _ = table.policy_table(
        again, {"is_first": np.zeros(1, bool)}, "train", [2]
    )
    assert actions["action"].tolist() == [1]  # The count of the first step.


class OnDevice(CountingAgent):
    """Agent that keeps the table itself, and records its calls."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def init_table(self, slots):
        self.asked.append(("init", slots))

    def reset_slots(self, slots):
        self.asked.append(("reset", list(slots)))

    def policy_table(self, slots, obs, mode, envids):
        self.asked.append(("step", slots.tolist(), mode, list(envids)))
        return {"action": slots}, {}


def test_an_agent_may_keep_the_table_on_its_device():
    agent = OnDevice()
    table = make_table(agent)
    assert table is agent
    slots = Slots(table, 2)
    found, _ = slots.find([8, 9])
    assert table.policy_table(found, {}, "eval", [8, 9])[0]["action"].tolist() == [0, 1]
    slots.done(found)
    slots.free([8])
    slots.find([1, 2, 3])
    assert agent.asked == [
        ("init", 2),
        ("step", [0, 1], "eval", [8, 9]),
        ("reset", [0]),
        ("init", 8),
    ]
    assert isinstance(make_table(CountingAgent()), HostTable)
