"""Counts what an update launches and moves on an H200, on a machine without one.

    python -m benchmarks.compiled --size size12m [--largest 20]
        [--flags "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"] [--out FILE]

XLA compiles for a described device, so this needs JAX with CUDA, but no GPU: `pip
install 'jax[cuda13]'`. Without a device, the compiler cannot time kernels for matrix
products and convolutions, so it takes its defaults. The last line is JSON:

- kernels: that an update launches, those of all iterations of loops included.
- loops: kernels of an iteration and number of iterations, by loop.
- traffic_mb: read and written by kernels outside of loops.
- temporary_mb: memory beside arguments and results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

# Description of the device that XLA reads instead of asking one.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
"""
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64"), 8),
}
# Operations that launch nothing.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all")
INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)"
    r"\((?P<inputs>[^)]*)\)(?P<rest>.*)$"
)


class Instruction(NamedTuple):
    """An operation of a compiled program."""

    name: str
    type: str
    op: str
    inputs: list[str]
    rest: str


class Program:
    """A compiled program, read from the text that XLA prints of it."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            begin = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if begin:
                name = begin[2]
                self.computations[name] = []
                self.entry = name if begin[1] else self.entry
            found = INSTRUCTION.match(line)
            if found and name:
                inputs = re.findall(r"%([\w.\-]+)", found["inputs"])
                self.computations[name].append(
                    Instruction(
                        found["name"], found["type"], found["op"], inputs, found["rest"]
                    )
                )

    def kernels(self, computation: str = "") -> int:
        """Kernels that a computation launches, by default the whole program."""
        total = 0
        for step in self.computations[computation or self.entry]:
            if step.op == "while":
                total += self.iterations(step) * self.kernels(_body(step))
            elif step.op not in FREE:
                total += 1
        return total

    def loops(self) -> Iterator[tuple[str, int, int]]:
        """Yields name, kernels of an iteration and iterations of each loop."""
        for step in self.computations[self.entry]:
            if step.op == "while":
                yield step.name, self.kernels(_body(step)), self.iterations(step)

    def traffic(self) -> list[tuple[int, Instruction]]:
        """Bytes that each kernel outside of loops reads and writes, largest first."""
        steps = self.computations[self.entry]
        sizes = {step.name: type_bytes(step.type) for step in steps}
        rows = [
            (sizes[step.name] + sum(sizes.get(x, 0) for x in set(step.inputs)), step)
            for step in steps
            if step.op not in (*FREE, "while")
        ]
        return sorted(rows, key=lambda row: -row[0])

    def iterations(self, loop: Instruction) -> int:
        """Number of iterations of a loop; 1 if the compiler does not know it."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
        return int(found[1]) if found else 1


def type_bytes(text: str) -> int:
    """Size of the arrays of a type such as `(f32[2,3]{1,0}, u8[4]{0})`."""
    return sum(
        BYTES.get(dtype, 0) * math.prod(int(size) for size in sizes.split(",") if size)
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", text)
    )


def compile_update(size: str) -> Any:
    """Compiles the update of the benchmark `train_step` for the described device."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from benchmarks import train_step as benchmark
    from dreamerv3 import model
    from dreamerv3.cli.config import load_config
    from dreamerv3.training import train_step

    try:
        target = topologies.get_topology_desc(
            "H200:1x1x1", platform="cuda", target_config=H200, topology="1x1x1"
        )
    except NotImplementedError as error:
        sys.exit(f"JAX has no compiler for CUDA ({error}): pip install 'jax[cuda13]'.")
    sharding = SingleDeviceSharding(target.devices[0])
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(["--configs", size, "--logdir", folder])
    options = benchmark.parse(["--size", size])

    def init(key: Any) -> model.State:
        return model.init(
            *(key, *benchmark.spaces(), config.agent),
            compute_dtype=options.dtype,
            tuning=model.ACCELERATOR,
        )

    state = jax.eval_shape(init, jax.random.key(0))
    batch = benchmark.make_batch(options, config.agent.dyn.rssm)
    carry = jax.eval_shape(lambda: model.init_carry(state.model, options.batch))
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (state, carry, batch, np.zeros(2, np.uint32)),
    )
    return jax.jit(train_step, donate_argnums=(0,)).lower(*arguments).compile()


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles an update, and prints the counts."""
    options = parse(argv)
    os.environ["XLA_FLAGS"] = f"{FLAGS} {options.flags}"
    os.environ["JAX_PLATFORMS"] = "cpu"  # The described device is not a platform.
    compiled = compile_update(options.size)
    text = compiled.as_text()
    if options.out:
        pathlib.Path(options.out).write_text(text)
    program = Program(text)
    traffic = program.traffic()
    for size, step in traffic[: options.largest]:
        place = re.search(r'op_name="([^"]*)"', step.rest)
        name = place[1][-60:] if place else ""
        print(f"{size / 1e6:9.1f} MB  {step.name[:40]:40}  {name}")
    memory = compiled.memory_analysis()
    result = {
        "size": options.size,
        "kernels": program.kernels(),
        "loops": {name: [each, count] for name, each, count in program.loops()},
        "traffic_mb": round(sum(size for size, _ in traffic) / 1e6),
        "temporary_mb": round(memory.temp_size_in_bytes / 1e6),
    }
    print(json.dumps(result), flush=True)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="size12m", help="block with the model's size")
    parser.add_argument("--flags", default="", help="further flags of XLA")
    parser.add_argument(
        "--largest", type=int, default=20, help="kernels with the most traffic to show"
    )
    parser.add_argument("--out", default="", help="file for the compiled program")
    return parser.parse_args(argv)


def _body(loop: Instruction) -> str:
    found = re.search(r"body=%?([\w.\-]+)", loop.rest)
    if found is None:
        raise ValueError(f"Expected a loop with a body, got {loop.name}{loop.rest}.")
    return found[1]


if __name__ == "__main__":
    raise SystemExit(main())
