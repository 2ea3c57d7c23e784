"""JAX is set up as the settings say, or an error says why not."""

import json
import os

import pytest
from program_testing import run_program, run_programs

from embodied.jax.setup import (
    SetupError,
    add_xla_flags,
    cache_folder,
    setup,
    xla_flags,
)
from embodied.rpc import free_port

COUNT = "xla_force_host_platform_device_count"


@pytest.mark.parametrize("platform", ["cuda", "auto"])
def test_flags_of_the_gpu_apply_to_cuda_and_to_auto(platform):
    deterministic = xla_flags(platform, 0, deterministic=True, several=False)
    assert deterministic == {"xla_gpu_deterministic_ops": "true"}
    several = xla_flags(platform, 0, deterministic=False, several=True)
    assert several == {"xla_gpu_enable_latency_hiding_scheduler": "true"}
    concurrent = xla_flags(platform, 0, False, False, concurrent=True)
    assert set(concurrent) == {
        "xla_gpu_enable_command_buffer",
        "xla_gpu_command_buffer_scheduling_mode",
    }
    assert xla_flags(platform, 0, deterministic=False, several=False) == {}


def test_the_cpu_gets_no_flags_of_the_gpu():
    assert xla_flags("cpu", 0, deterministic=True, several=True) == {}
    assert xla_flags("cpu", 3, deterministic=True, several=True) == {COUNT: "3"}


def test_the_compiler_knows_all_flags():
    # The compiler ends the process if it does not know a flag.
    code = """
import os
from embodied.jax.setup import add_xla_flags, xla_flags
flags = xla_flags('cuda', 0, deterministic=True, several=True, concurrent=True)
add_xla_flags(os.environ, flags)
import jax
print(jax.jit(lambda x: x + 1)(1), os.environ['XLA_FLAGS'])
"""
    result, *flags = run_program(code, JAX_PLATFORMS="cpu").split()
    assert result == "2"
    assert "--xla_gpu_deterministic_ops=true" in flags


def test_flags_of_the_user_stay_and_win():
    environ = {"XLA_FLAGS": "--xla_dump_to=/x --xla_gpu_deterministic_ops=false"}
    add_xla_flags(environ, {"xla_gpu_deterministic_ops": "true", "xla_other": "1"})
    assert environ["XLA_FLAGS"].split() == [
        "--xla_dump_to=/x",
        "--xla_gpu_deterministic_ops=false",
        "--xla_other=1",
    ]


def test_adding_flags_twice_changes_nothing():
    environ: dict[str, str] = {}
    add_xla_flags(environ, {"xla_other": "1"})
    add_xla_flags(environ, {"xla_other": "1"})
    assert environ == {"XLA_FLAGS": "--xla_other=1"}


def test_no_flags_leave_the_environment_alone():
    environ: dict[str, str] = {}
    add_xla_flags(environ, {})
    assert environ == {}


def test_another_number_of_mock_devices_by_the_user_is_an_error():
    environ = {"XLA_FLAGS": f"--{COUNT}=3"}
    with pytest.raises(SetupError, match=r"mock_devices.*=3, got 8"):
        add_xla_flags(environ, {COUNT: "8"})
    assert environ == {"XLA_FLAGS": f"--{COUNT}=3"}


def test_settings_that_do_not_go_together_are_named():
    with pytest.raises(ValueError, match=r"jax\.platform: expected .* got 'gpu'"):
        setup("gpu")
    with pytest.raises(ValueError, match=r"jax\.mock_devices: expected 0"):
        setup("cuda", mock_devices=2)


def test_cache_folder_is_the_users(tmp_path):
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path)})
    assert folder.is_relative_to(tmp_path)


PREPARE = """
import json, os, sys
from embodied.jax.setup import setup
options = json.loads(sys.argv[1])
backend = setup(**options)
import jax
print(json.dumps({
    'platform': backend.platform, 'dtype': backend.compute_dtype,
    'devices': backend.devices, 'flags': os.environ.get('XLA_FLAGS', ''),
    'cache': jax.config.jax_compilation_cache_dir,
    'prealloc': os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'),
    'jit': not jax.config.jax_disable_jit, 'nans': jax.config.jax_debug_nans,
}))
"""


def prepare(options, **environ):
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")  # Not the cache of the tests.
    return json.loads(run_program(PREPARE, json.dumps(options), **environ))


def test_mock_devices_and_float32_on_the_cpu(tmp_path):
    options = {"platform": "auto", "mock_devices": 3, "expect_devices": 3}
    options |= {"prealloc": False, "jit": False, "debug": True}
    found = prepare(
        options, XDG_CACHE_HOME=str(tmp_path), XLA_FLAGS=f"--xla_dump_to={tmp_path}"
    )
    assert (found["platform"], found["dtype"], found["devices"]) == (
        "cpu",
        "float32",
        3,
    )
    assert f"--xla_dump_to={tmp_path}" in found["flags"]
    assert os.path.commonpath([found["cache"], tmp_path]) == str(tmp_path)
    assert os.stat(found["cache"]).st_mode & 0o777 == 0o700
    assert found["prealloc"] == "false"
    assert not found["jit"] and found["nans"]


def test_folder_of_the_user_for_compiled_programs_stays(tmp_path):
    found = prepare({"platform": "cpu"}, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert found["cache"] == str(tmp_path)
    assert found["prealloc"] is None
    assert found["jit"] and not found["nans"]


def test_devices_other_than_asked_for_are_an_error_that_says_what_was_found(tmp_path):
    code = """
import jax
from embodied.jax.setup import setup, SetupError
for options in (
    {'platform': 'cpu', 'expect_devices': 4},
    {'platform': 'cpu', 'mock_devices': 2},
    {'platform': 'cpu', 'replicas': 2},
):
    try:
        jax.devices()
        setup(**options)
    except (SetupError, ValueError) as error:
        print(type(error).__name__, error)
"""
    lines = run_program(code, XDG_CACHE_HOME=str(tmp_path), JAX_PLATFORMS="cpu")
    first, second, third = lines.splitlines()
    assert "SetupError jax.expect_devices: expected 4, got 1 cpu devices" in first
    assert "expected 2 for each of 1 hosts, got 1 cpu" in second
    assert "initialised in this process before" in second
    assert "jax.coordinator_address: expected HOST:PORT" in third


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_platform_that_is_not_there_is_an_error(tmp_path, platform):
    code = """
import sys
from embodied.jax.setup import setup, SetupError
try:
    setup(sys.argv[1])
except SetupError as error:
    print(error)
"""
    hidden = {"TPU_SKIP_MDS_QUERY": "1", "CUDA_VISIBLE_DEVICES": ""}
    message = run_program(code, platform, XDG_CACHE_HOME=str(tmp_path), **hidden)
    assert f"jax.platform: expected {platform} devices" in message
    assert "--jax.platform cpu" in message


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    code = "from embodied.jax.setup import setup; print(setup('cpu').platform)"
    none = {"JAX_COMPILATION_CACHE_DIR": ""}
    output = run_program(code, XDG_CACHE_HOME=str(tmp_path / "file"), **none)
    assert "are not cached" in output
    assert output.endswith("cpu\n")


HOST = """
import json, os, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
from embodied.jax.setup import setup
setup('cpu', replica=int(sys.argv[1]), replicas=2, coordinator_address=sys.argv[2])
os.kill(os.getpid(), signal.SIGTERM)
deadline = time.monotonic() + 30
while not heard and time.monotonic() < deadline:
    time.sleep(0.01)
from embodied.jax.compiling import compile_ahead
time.sleep(2 * int(sys.argv[1]))
begin = time.monotonic()  # A clock that both hosts share here.
compile_ahead(lambda x: x + 1, (1.0,), name='a function', hosts=True)
print(json.dumps({'heard': heard, 'begin': begin, 'end': time.monotonic()}))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """The output of two hosts that connect, receive a signal, and compile."""
    folder = tmp_path_factory.mktemp("hosts")
    environ = {"XDG_CACHE_HOME": str(folder), "JAX_PLATFORMS": "cpu"}
    address = f"localhost:{free_port()}"
    outputs = run_programs(HOST, [("0", address), ("1", address)], **environ)
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def test_hosts_that_train_together_still_hear_signals(hosts):
    assert [host["heard"] for host in hosts] == [[True]] * 2


def test_hosts_wait_for_the_slowest_compiler(hosts):
    last = max(host["begin"] for host in hosts)
    assert min(host["end"] for host in hosts) >= last
