from __future__ import annotations

import pickle

import elements
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embodied import Space

# Other work on the machine must not decide whether a test passes.

INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]
FLOATS = [np.float16, np.float32, np.float64]

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
seeds = st.integers(0, 2**32)


@st.composite
def integer_spaces(draw):
    dtype = draw(st.sampled_from(INTEGERS))
    info = np.iinfo(dtype)
    low = draw(st.integers(info.min, info.max - 1))
    high = draw(st.integers(low + 1, info.max + 1))
    return Space(dtype, draw(shapes), low, high)


@st.composite
def float_spaces(draw):
    dtype = draw(st.sampled_from(FLOATS))
    width = np.dtype(dtype).itemsize * 8
    bound = st.none() | st.floats(allow_nan=False, allow_infinity=False, width=width)
    low, high = draw(bound), draw(bound)
    if low is not None and high is not None and low > high:
        low, high = high, low
    return Space(dtype, draw(shapes), low, high)


bool_spaces = st.builds(
    lambda shape, low, high: Space(bool, shape, min(low, high), max(low, high)),
    *(shapes, st.booleans(), st.booleans()),
)
numeric_spaces = integer_spaces() | float_spaces() | bool_spaces
spaces = numeric_spaces | st.builds(Space, st.just(str), shapes)


class TestSample:
    @given(numeric_spaces, seeds)
    def test_lies_in_the_space(self, space, seed):
        value = space.sample(seed)
        assert value.dtype == space.dtype
        assert value.shape == space.shape
        assert value in space

    @given(numeric_spaces, seeds)
    def test_is_the_same_for_the_same_seed_or_generator_state(self, space, seed):
        first = space.sample(seed)
        np.testing.assert_array_equal(first, space.sample(seed))
        rng = np.random.default_rng(seed)
        np.testing.assert_array_equal(first, space.sample(rng))

    def test_goes_on_with_a_generator(self):
        rng = np.random.default_rng(0)
        space = Space(np.float32, 4)
        assert not np.array_equal(space.sample(rng), space.sample(rng))

    def test_covers_all_integers_up_to_the_exclusive_high(self):
        values = Space(np.int32, 1000, -1, 3).sample(0)
        assert set(values.tolist()) == {-1, 0, 1, 2}

    def test_covers_both_booleans_unless_bounds_forbid_it(self):
        assert set(Space(bool, 100).sample(0).tolist()) == {False, True}
        assert Space(bool, 100, True).sample(0).all()
        assert not Space(bool, 100, None, False).sample(0).any()

    def test_covers_images_up_to_255(self):
        values = Space(np.uint8, 10_000, 0, 255).sample(0)
        assert (values.min(), values.max()) == (0, 255)

    def test_is_uniform_between_finite_float_bounds(self):
        values = Space(np.float32, 10_000, 2, 6).sample(0)
        # Mean 4 and variance 16 / 12, standard errors 0.012 and 0.012.
        assert values.mean() == pytest.approx(4, abs=0.06)
        assert values.var() == pytest.approx(16 / 12, abs=0.06)

    def test_is_normal_without_bounds_and_exponential_with_one(self):
        normal = Space(np.float64, 10_000).sample(0)
        assert normal.mean() == pytest.approx(0, abs=0.05)
        assert normal.std() == pytest.approx(1, abs=0.05)
        above = Space(np.float64, 10_000, low=3).sample(0)
        assert above.min() >= 3
        assert above.mean() == pytest.approx(4, abs=0.06)
        below = Space(np.float64, 10_000, high=3).sample(0)
        assert below.max() <= 3
        assert below.mean() == pytest.approx(2, abs=0.06)

    def test_does_not_overflow_in_the_widest_range(self):
        largest = np.finfo(np.float64).max
        values = Space(np.float64, 100, -largest, largest).sample(0)
        assert np.isfinite(values).all()

    def test_respects_bounds_per_element(self):
        space = Space(np.int32, (3,), [0, 10, 20], [1, 11, 21])
        assert space.sample(0).tolist() == [0, 10, 20]

    def test_strings_cannot_be_sampled(self):
        with pytest.raises(TypeError, match="strings cannot be sampled"):
            Space(str).sample()


class TestContains:
    @given(integer_spaces(), st.data())
    def test_integers_between_low_and_exclusive_high(self, space, data):
        value = data.draw(hnp.arrays(space.dtype, space.shape))
        # A high at the dtype's maximum admits the maximum itself.
        info = np.iinfo(space.dtype)
        high = np.where(space.high >= info.max, info.max, space.high - 1)
        flat = zip(value.ravel(), space.low.ravel(), high.ravel())
        expected = all(int(low) <= int(x) <= int(high) for x, low, high in flat)
        assert (value in space) == expected

    @given(float_spaces(), st.data())
    def test_floats_between_both_bounds(self, space, data):
        value = data.draw(hnp.arrays(space.dtype, space.shape))
        expected = bool(np.all(value >= space.low) and np.all(value <= space.high))
        assert (value in space) == expected

    @pytest.mark.parametrize(
        ("value", "inside"),
        [
            (np.float32(0.5), True),
            (np.float32(1), True),
            (np.float32(1.1), False),
            (np.float32(np.nan), False),
            (np.float64(0.5), False),
            (np.ones(1, np.float32), False),
            ("text", False),
            ([[1], [1, 2]], False),
        ],
    )
    def test_dtype_shape_and_bounds_must_fit(self, value, inside):
        assert (value in Space(np.float32, (), 0, 1)) == inside

    def test_strings_of_any_length(self):
        assert "text" in Space(str)
        assert np.array(["a", "bcd"]) in Space(str, 2)
        assert "text" not in Space(str, 2)
        assert 3 not in Space(str)


class TestBounds:
    def test_default_to_the_range_of_the_dtype(self):
        assert Space(np.uint8).high == 256
        assert Space(np.int32).low == -(2**31)
        assert Space(np.float32).low == -np.inf
        assert Space(np.int64).high == 2**63 - 1, "the largest that fits"

    @pytest.mark.parametrize("dtype", INTEGERS)
    def test_infinite_bounds_of_integers_mean_the_range_of_the_dtype(self, dtype):
        assert Space(dtype, (), -np.inf, np.inf) == Space(dtype)

    def test_float_bounds_of_integers_must_be_whole_numbers(self):
        assert Space(np.int32, (), 0.0, 5.0) == Space(np.int32, (), 0, 5)
        assert Space(np.int64, (), 0, 2.0**63).high == 2**63 - 1
        with pytest.raises(ValueError, match=r"whole numbers as high .* got 2\.5"):
            Space(np.int32, (), 0, 2.5)

    @pytest.mark.parametrize(
        ("dtype", "low", "high"),
        [
            (np.uint8, -1, 5),
            (np.uint8, 0, 257),
            (np.int8, 200, 300),
            (np.uint64, -1, 5),
            (np.int64, 0, 2**64),
            (np.int32, 0.0, 1e10),
        ],
    )
    def test_integers_that_the_dtype_cannot_hold_are_refused(self, dtype, low, high):
        with pytest.raises(ValueError, match=r"Space expected (low|high) of dtype"):
            Space(dtype, (), low, high)

    def test_floats_that_the_dtype_cannot_hold_are_no_bound(self):
        assert Space(np.float32, (), -1e300, 1e300) == Space(np.float32)

    def test_broadcast_to_the_shape(self):
        space = Space(np.float32, (2, 3), [0, 1, 2], 5)
        assert space.low.tolist() == [[0, 1, 2], [0, 1, 2]]
        assert space.high.shape == (2, 3)
        with pytest.raises(ValueError, match=r"broadcasts to \(2,\), got \(3,\)"):
            Space(np.float32, (2,), [0, 1, 2])

    def test_give_the_shape_if_there_is_none(self):
        assert Space(np.float32, None, [0, 0], 1).shape == (2,)

    @pytest.mark.parametrize(
        ("dtype", "low", "high"),
        [(np.float32, 1, 0), (np.int32, 3, 3), (np.int32, 4, 3), (bool, True, False)],
    )
    def test_must_leave_something_in_between(self, dtype, low, high):
        with pytest.raises(ValueError, match="expected low below high"):
            Space(dtype, (), low, high)

    @pytest.mark.parametrize("dtype", [np.float32, np.int32])
    def test_must_be_numbers(self, dtype):
        with pytest.raises(ValueError, match="expected numbers as low, got nan"):
            Space(dtype, (), np.nan, 1)

    def test_strings_have_none(self):
        assert Space(str).low is None
        assert Space(str).high is None
        with pytest.raises(ValueError, match="strings has no bounds"):
            Space(str, (), 0, 1)


class TestClasses:
    def test_are_counted_from_low_to_high(self):
        assert Space(np.int32, (), 2, 6).classes == 4
        assert Space(bool).classes == 2
        classes = Space(np.int32, 2, [0, 1], [3, 9]).classes
        assert classes.tolist() == [3, 8]

    @pytest.mark.parametrize("dtype", [np.int64, np.uint64])
    def test_do_not_overflow(self, dtype):
        assert Space(dtype).classes == 2**64 - 1
        assert Space(dtype, 2).classes.tolist() == [2**64 - 1] * 2

    def test_floats_have_none(self):
        with pytest.raises(TypeError, match="Only discrete spaces have classes"):
            _ = Space(np.float32).classes


class TestIdentity:
    @given(spaces)
    def test_equal_spaces_hash_alike_and_survive_pickling(self, space):
        copy = pickle.loads(pickle.dumps(space))
        assert copy == space
        assert hash(copy) == hash(space)
        assert repr(copy) == repr(space)

    @pytest.mark.parametrize(
        "other",
        [
            Space(np.float64, (2,), 0, 1),
            Space(np.float32, (3,), 0, 1),
            Space(np.float32, (2,), -1, 1),
            Space(np.float32, (2,), 0, [1, 2]),
            "space",
        ],
    )
    def test_spaces_that_differ_in_anything_are_unequal(self, other):
        assert Space(np.float32, (2,), 0, 1) != other

    def test_prints_its_bounds(self):
        space = Space(np.float32, (2,), [0, 1], 5)
        assert repr(space) == "Space(float32, shape=(2,), low=0.0..1.0, high=5.0)"


class TestConstruction:
    @pytest.mark.parametrize("dtype", [object, np.complex64, "datetime64[s]", bytes])
    def test_refuses_other_dtypes(self, dtype):
        with pytest.raises(TypeError, match="bool, integer, float or string dtype"):
            Space(dtype)

    @pytest.mark.parametrize("shape", [0, (2, 0), (-1,)])
    def test_refuses_empty_dimensions(self, shape):
        with pytest.raises(ValueError, match="positive dimensions"):
            Space(np.float32, shape)

    def test_takes_an_integer_as_a_vector(self):
        assert (
            Space(np.float32, 3).shape == Space(np.float32, np.int64(3)).shape == (3,)
        )

    @pytest.mark.parametrize(
        ("dtype", "discrete"),
        [(bool, True), (np.uint8, True), (np.float32, False), (str, False)],
    )
    def test_knows_whether_it_is_discrete(self, dtype, discrete):
        assert Space(dtype).discrete == discrete


class TestOf:
    @given(spaces)
    def test_returns_ours_as_they_are(self, space):
        assert Space.of(space) is space

    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            ((np.uint8, (4, 4, 3), 0, 255), Space(np.uint8, (4, 4, 3), 0, 255)),
            ((np.int32, (), 0, 5), Space(np.int32, (), 0, 5)),
            ((np.int32,), Space(np.int32, (), None, 2**31 - 1)),
            ((np.float32, (2,), -1, 1), Space(np.float32, (2,), -1, 1)),
            ((np.float32, (2,)), Space(np.float32, (2,))),
            ((bool,), Space(bool)),
            ((str,), Space(str)),
        ],
    )
    def test_converts_those_of_elements(self, args, expected):
        assert Space.of(elements.Space(*args)) == expected

    def test_refuses_anything_else_and_says_what_is_missing(self):
        with pytest.raises(TypeError, match="without dtype, shape, low, high"):
            Space.of(3)
