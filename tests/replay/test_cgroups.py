"""Memory limits of control groups, read from fake folders and files."""

import math

import pytest

from embodied.replay.sizing import cgroup_bytes_left

UNLIMITED_V1 = 9223372036854771712  # The value that version 1 writes for no limit.


@pytest.fixture
def system(tmp_path):
    """Fake control groups, which can be asked how much memory they leave."""
    return System(tmp_path)


class System:
    def __init__(self, folder):
        self.membership, self.root = folder / "self", folder / "cgroup"

    def group(self, path, limit, used):
        self._write(path, {"memory.max": limit, "memory.current": used})

    def group_v1(self, path, limit, used):
        names = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used}
        self._write(f"memory/{path}", names)

    def left(self, *lines):
        self.membership.write_text("".join(f"{line}\n" for line in lines))
        return cgroup_bytes_left(self.membership, self.root)

    def _write(self, path, files):
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")


def test_without_groups_or_limits_there_is_no_limit(system):
    assert cgroup_bytes_left(system.membership, system.root) == math.inf
    assert system.left("0::/") == math.inf
    system.group("user.slice", "max", 300)
    assert system.left("0::/user.slice") == math.inf
    assert system.left("nonsense", "") == math.inf


def test_in_a_container_the_root_has_the_limit(system):
    system.group("", 1000, 300)
    assert system.left("0::/") == 700
    assert system.left("0::/kubepods/pod1/name-from-outside") == 700
    assert system.left("0::/../beside") == 700


@pytest.mark.parametrize("path", ["job_1", "job_1/step_0/user/task_0"])
def test_the_limit_of_a_group_holds_for_those_in_it(system, path):
    system.group("system.slice/job_1", 2000, 600)
    system.group("system.slice/job_2", 100, 99)
    assert system.left(f"0::/system.slice/{path}") == 1400


def test_the_least_that_is_left_on_the_way_up_counts(system):
    system.group("slice", 5000, 4900)
    system.group("slice/job", 2000, 600)
    system.group("slice/job/step", "max", 500)
    assert system.left("0::/slice/job/step") == 100
    system.group("slice", 5000, 5001)
    assert system.left("0::/slice/job/step") == 0, "and never less than nothing"


def test_version_1_has_a_folder_for_memory(system):
    lines = ("5:cpu,cpuacct:/other", "4:memory:/slurm/uid_1/job_7", "1:name=systemd:/x")
    system.group_v1("", UNLIMITED_V1, 900)
    assert system.left(*lines) > 1 << 60
    system.group_v1("slurm/uid_1", 3000, 800)
    system.group_v1("slurm/uid_1/job_7", UNLIMITED_V1, 10)
    system.group_v1("other", 20, 10)
    assert system.left(*lines) == 2200
    assert system.left("4:memory:/docker/name-from-outside") > 1 << 60
    system.group_v1("", 1000, 400)
    assert system.left("4:memory:/docker/name-from-outside") == 600


def test_both_versions_together(system):
    system.group_v1("job", 3000, 800)
    system.group("job", "max", 1)
    assert system.left("4:memory,hugetlb:/job", "0::/job") == 2200


def test_files_in_memory_are_not_in_use(system):
    system.group("job", 1000, 900)
    (system.root / "job/memory.stat").write_text("anon 300\ninactive_file 500\n")
    assert system.left("0::/job") == 600
    (system.root / "job/memory.stat").write_text("nonsense\n")
    assert system.left("0::/job") == 100
    system.group_v1("job", 1000, 900)
    lines = "inactive_file 10\ntotal_inactive_file 50\n"
    (system.root / "memory/job/memory.stat").write_text(lines)
    assert system.left("5:memory:/job") == 150
