import jax
import jax.numpy as jnp
import numpy as np
import pytest

from embodied.jax import values
from embodied.space import Space


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def encode(space, value):
    return np.asarray(values.encode(space, "key", jnp.asarray(value, space.dtype)))


def test_floats_are_flattened():
    space = Space(np.float32, (2, 2))
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    np.testing.assert_array_equal(encode(space, x), x.reshape(2, 4))
    assert values.vector_size(space, "key") == 4


def test_scalars_become_vectors_of_one():
    np.testing.assert_array_equal(encode(Space(np.float32), [3.0, 4.0]), [[3], [4]])


def test_integers_become_one_hots_counted_from_the_lowest():
    space = Space(np.int32, 2, 5, 8)
    np.testing.assert_array_equal(encode(space, [[5, 7]]), [[1, 0, 0, 0, 0, 1]])
    assert values.vector_size(space, "key") == 6


def test_booleans_have_two_classes():
    np.testing.assert_array_equal(encode(Space(bool), [False, True]), np.eye(2))


@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan])
def test_one_missing_float_makes_the_whole_step_zero(bad):
    space = Space(np.float32, 2)
    result = encode(space, [[1, 2], [bad, 3], [4, 5]])
    np.testing.assert_array_equal(result, [[1, 2], [0, 0], [4, 5]])


def test_one_missing_integer_makes_the_whole_step_zero():
    space = Space(np.int32, 2, 0, 3)
    x = jnp.array([[1, 2], [-1, 2]], jnp.int32)
    np.testing.assert_array_equal(values.present(space, x), [True, False])
    np.testing.assert_array_equal(encode(space, x)[1], 0)


def test_minus_one_is_a_value_where_the_space_contains_it():
    space = Space(np.int32, (), -1, 2)
    np.testing.assert_array_equal(encode(space, [-1]), [[1, 0, 0]])


@pytest.mark.parametrize("dtype", [np.uint8, bool])
def test_unsigned_values_are_never_missing(dtype):
    space = Space(dtype, 2)
    x = jnp.ones((3, 2), dtype) * jnp.array(1, dtype)
    np.testing.assert_array_equal(values.present(space, x), True)
    x = jnp.full((3, 2), np.iinfo(np.uint8).max if dtype == np.uint8 else True, dtype)
    np.testing.assert_array_equal(values.present(space, x), True)


def test_class_values_and_indices_are_inverse():
    for space in (Space(np.int32, 3, -2, 5), Space(bool, 3), Space(np.uint8, 3)):
        x = jnp.asarray(space.sample(0))
        back = values.class_value(space, values.class_index(space, x))
        np.testing.assert_array_equal(back, x)
        assert back.dtype == space.dtype


def test_classes_are_few_and_those_of_elements_may_differ():
    assert values.classes(Space(np.int32, 2, 0, 4), "key") == 4
    assert values.class_counts(Space(np.int32, 2, 0, 4)) is None
    unequal = Space(np.int32, 2, 0, [3, 4])
    assert values.classes(unequal, "key") == 4
    np.testing.assert_array_equal(values.class_counts(unequal), [3, 4])
    with pytest.raises(ValueError, match="at most 65536"):
        values.classes(Space(np.int32), "key")
