"""Counts of a compiled program, read from its text."""

from __future__ import annotations

import pytest

from benchmarks.compiled import Program, type_bytes

TEXT = """HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused (param: f32[8]) -> f32[8] {
  %param = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%param, %param)
}

%body.2 (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %get.1 = f32[8]{0} get-tuple-element(%carry), index=1
  %fusion.1 = f32[8]{0} fusion(%get.1), kind=kLoop, calls=%fused
  %dot.1 = f32[8]{0} custom-call(%fusion.1), custom_call_target="__cublas$gemm"
  ROOT %tuple.1 = (s32[], f32[8]{0}) tuple(%get.1, %dot.1)
}

ENTRY %main.9 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %wide.1 = (bf16[4,2]{1,0}, u8[16]{0}) fusion(%x), kind=kLoop, calls=%fused
  %while.1 = (s32[], f32[8]{0}) while(%wide.1), condition=%cond, body=%body.2, \
backend_config={"known_trip_count":{"n":"16"}}
  ROOT %copy.1 = f32[8]{0} copy(%x)
}
"""


def test_kernels_of_loops_count_for_every_iteration():
    program = Program(TEXT)
    assert program.kernels() == 2 + 16 * 2
    assert list(program.loops()) == [("while.1", 2, 16)]


def test_traffic_is_what_kernels_outside_of_loops_read_and_write():
    rows = {step.name: size for size, step in Program(TEXT).traffic()}
    assert rows == {"copy.1": 2 * 32, "wide.1": 32 + 4 * 2 * 2 + 16}


@pytest.mark.parametrize(
    ("text", "size"),
    [("f32[]", 4), ("(bf16[2,3]{1,0}, pred[7]{0})", 19), ("token[]", 0)],
)
def test_sizes_of_types(text, size):
    assert type_bytes(text) == size
