"""Tests the items of Stateless, Map, Zip, Mixer and Consec, and how streams resume."""

from __future__ import annotations

import json
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_testing import (
    Count,
    no_thread_is_left,  # noqa: F401
    take,
)

from embodied import streams


def plain(tree):
    """Turns arrays into lists that compare by dtype, shape and value."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if isinstance(tree, np.ndarray):
        return [tree.dtype.name, list(tree.shape), tree.tolist()]
    return tree


def through_checkpoint(state):
    """Copies a state as a checkpoint does: arrays apart, all else as JSON."""
    arrays = []

    def lift(tree):
        if isinstance(tree, np.ndarray):
            arrays.append(tree.copy())
            return {"array": len(arrays) - 1}
        if isinstance(tree, dict):
            assert all(type(key) is str for key in tree), list(tree)
            return {"dict": {key: lift(value) for key, value in tree.items()}}
        if isinstance(tree, list | tuple):
            return {"list": [lift(value) for value in tree]}
        assert type(tree) in (str, int, float, bool, type(None)), type(tree)
        return {"plain": tree}

    def lower(tree):
        ((kind, value),) = tree.items()
        if kind == "array":
            return arrays[value]
        if kind == "dict":
            return {key: lower(child) for key, child in value.items()}
        return [lower(child) for child in value] if kind == "list" else value

    return lower(json.loads(json.dumps(lift(state))))


# Random nestings. A recipe is a tuple of plain values from which `build` makes the
# same stream any number of times.

counts = st.tuples(
    st.just("count"), st.integers(0, 99), st.sampled_from([3, 9, 10**9])
).map(lambda recipe: (recipe[0], recipe[1], recipe[1] + recipe[2]))


def nest(inner):
    small = st.integers(1, 3)
    return st.one_of(
        st.tuples(st.just("map"), inner, small),
        st.tuples(st.just("prefetch"), inner, small),
        st.tuples(st.just("consec"), inner, small, small, st.integers(0, 2)),
        st.tuples(st.just("zip"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(
            st.just("mixer"),
            st.lists(inner, min_size=1, max_size=3),
            st.integers(0, 99),
        ),
    )


recipes = st.recursive(counts, nest, max_leaves=4)


def checksum(item, offset=0):
    return zlib.crc32(json.dumps(plain(item)).encode()) + offset


def make_sample(item, steps, prefix):
    value = np.arange(2 * steps).reshape(2, steps) + checksum(item)
    sample = {"value": value, "image": value[..., None].astype(np.uint8)}
    if prefix:
        sample["dyn/deter"] = value[:, :prefix].astype(np.float32)
    return sample


def build(recipe):
    kind, *args = recipe
    if kind == "count":
        return Count(*args)
    if kind == "map":
        return streams.Map(build(args[0]), checksum, args[1])
    if kind == "prefetch":
        return streams.Prefetch(build(args[0]), checksum, args[1])
    if kind == "zip":
        return streams.Zip([build(inner) for inner in args[0]])
    if kind == "mixer":
        sources = {str(i): build(inner) for i, inner in enumerate(args[0])}
        weights = {name: int(name) + 1 for name in sources}
        return streams.Mixer(sources, weights, args[1])
    source, length, consec, prefix = args
    steps = length * consec + prefix
    source = streams.Map(build(source), make_sample, steps=steps, prefix=prefix)
    return streams.Consec(source, length, consec, prefix)


def check_restores(recipe, before, after):
    with streams.Map(build(recipe), plain) as first:
        take(first, before)
        state = through_checkpoint(first.save())
        expected = take(first, after)
        first.load(state)
        assert take(first, after) == expected, "going back in the same stream"
    with streams.Map(build(recipe), plain) as second:
        second.load(state)
        assert plain(second.save()) == plain(state)
        assert take(second, after) == expected, "going on in a new stream"


class TestSavedAnywhereTheRestIsEqual:
    @settings(max_examples=20)
    @given(st.integers(0, 12), st.sampled_from(["map", "prefetch", "zip", "mixer"]))
    def test_around_a_counter(self, before, kind):
        counter = ("count", 5, 15)
        recipe = {
            "map": ("map", counter, 2),
            "prefetch": ("prefetch", counter, 3),
            "zip": ("zip", [counter, ("count", 0, 99)]),
            "mixer": ("mixer", [counter, ("count", 100, 200)], 7),
        }[kind]
        check_restores(recipe, before, 12)

    @settings(max_examples=30)
    @given(
        before=st.integers(0, 12),
        length=st.integers(1, 3),
        consec=st.integers(1, 4),
        prefix=st.integers(0, 2),
    )
    def test_consec_in_the_middle_of_a_sequence(self, before, length, consec, prefix):
        check_restores(("consec", ("count", 0, 6), length, consec, prefix), before, 9)

    @settings(max_examples=60)
    @given(recipes, st.integers(0, 7), st.integers(1, 7))
    def test_random_nestings(self, recipe, before, after):
        check_restores(recipe, before, after)

    @pytest.mark.slow
    @settings(max_examples=3000)
    @given(recipes, st.integers(0, 30), st.integers(1, 30))
    def test_random_nestings_in_long_rounds(self, recipe, before, after):
        check_restores(recipe, before, after)

    @given(recipe=recipes, amount=st.integers(1, 8))
    @settings(max_examples=30)
    def test_saving_does_not_disturb_the_reader(self, recipe, amount):
        with streams.Map(build(recipe), plain) as quiet:
            expected = take(quiet, amount)
        with streams.Map(build(recipe), plain) as saved:
            items = []
            for _ in range(amount):
                saved.save()
                items += take(saved, 1)
            assert items == expected


class TestStateless:
    def test_calls_the_function_with_its_arguments_for_each_item(self):
        calls = []
        stream = streams.Stateless(lambda *a, **kw: calls.append((a, kw)), 1, mode="x")
        take(stream, 2)
        assert calls == [((1,), {"mode": "x"})] * 2

    def test_passes_an_iterator_on_to_its_end(self):
        assert list(streams.Stateless(iter([1, 2, 3]))) == [1, 2, 3]

    def test_has_no_state(self):
        stream = streams.Stateless(Count().__next__)
        take(stream, 3)
        assert stream.save() is None
        stream.load(None)
        assert next(stream) == 3


class TestMapZipMixer:
    def test_map_applies_the_function_with_further_arguments(self):
        stream = streams.Map(Count(), lambda item, a, b: (item, a, b), 1, b=2)
        assert take(stream, 2) == [(0, 1, 2), (1, 1, 2)]

    def test_zip_ends_with_the_shortest_source(self):
        stream = streams.Zip([Count(0), Count(10, limit=12)])
        assert list(stream) == [(0, 10), (1, 11)]

    def test_zip_refuses_states_of_another_number_of_sources(self):
        with pytest.raises(ValueError, match="3 sources, got 1"):
            streams.Zip([Count()] * 3).load(streams.Zip([Count()]).save())

    def test_mixer_draws_by_weight(self):
        sources = {"a": Count(0), "b": Count(1000), "never": Count(2000)}
        stream = streams.Mixer(sources, {"a": 3, "b": 1, "never": 0})
        items = take(stream, 400)
        # 300 expected, standard deviation 8.7.
        assert 260 < sum(item < 1000 for item in items) < 340
        assert max(items) < 2000

    def test_mixer_repeats_its_order_for_the_same_seed_alone(self):
        def order(seed, names=("a", "b")):
            starts = {"a": 0, "b": 1000}
            sources = {name: Count(starts[name]) for name in names}
            weights = dict.fromkeys(names, 1)
            return take(streams.Mixer(sources, weights, seed), 50)

        assert order(1) == order(1) == order(1, ("b", "a"))
        assert order(1) != order(2)

    @pytest.mark.parametrize(
        "weights",
        [{"a": 1}, {"a": 0, "b": 0}, {"a": -1, "b": 2}, {"a": np.nan, "b": 1}],
    )
    def test_mixer_refuses_weights_it_cannot_draw_by(self, weights):
        with pytest.raises(ValueError, match=r"Mixer expected .* weight"):
            streams.Mixer({"a": Count(), "b": Count()}, weights)

    def test_mixer_refuses_states_of_other_sources(self):
        state = streams.Mixer({"a": Count()}, {"a": 1}).save()
        with pytest.raises(ValueError, match=r"\['b'\], got \['a'\]"):
            streams.Mixer({"b": Count()}, {"b": 1}).load(state)

    def test_what_is_no_stream_is_refused_with_advice(self):
        with pytest.raises(
            TypeError, match="Wrap functions and iterators in Stateless"
        ):
            streams.Map(iter([1]), str)

    def test_a_state_of_another_stream_is_refused(self):
        with pytest.raises(ValueError, match="Mixer expected a state with 'rng'"):
            streams.Mixer({"a": Count()}, {"a": 1}).load(streams.Zip([Count()]).save())

    def test_closing_reaches_all_sources(self):
        sources = [Count() for _ in range(3)]
        stream = streams.Mixer(
            {
                "a": streams.Zip([sources[0], streams.Map(sources[1], str)]),
                "b": streams.Prefetch(streams.Consec(sources[2], 1, 1)),
            },
            {"a": 1, "b": 1},
        )
        stream.close()
        assert [source.closed for source in sources] == [1, 1, 1]


def consec(sample, *args, **kwargs):
    stream = streams.Consec(streams.Stateless(iter([sample])), *args, **kwargs)
    return list(stream)


class TestConsec:
    def test_cuts_as_drawn_in_the_docstring(self):
        sample = {"x": np.array([[8, 9, 0, 0, 0, 1, 1, 1, 2, 2, 2]])}
        chunks = consec(sample, length=3, consec=3, prefix=2)
        assert [chunk["x"].tolist() for chunk in chunks] == [
            [[8, 9, 0, 0, 0]],
            [[0, 0, 1, 1, 1]],
            [[1, 1, 2, 2, 2]],
        ]

    def test_numbers_the_chunks(self):
        sample = {"x": np.zeros((2, 7))}
        chunks = consec(sample, length=3, consec=2, prefix=1)
        for index, chunk in enumerate(chunks):
            assert chunk["consec"].dtype == np.int32
            np.testing.assert_array_equal(chunk["consec"], np.full((2, 4), index))

    @given(
        batch=st.integers(1, 3),
        length=st.integers(1, 4),
        amount=st.integers(1, 4),
        prefix=st.integers(0, 3),
        extra=st.integers(0, 2),
        contiguous=st.booleans(),
    )
    def test_chunks_without_their_context_make_up_the_sample(
        self, batch, length, amount, prefix, extra, contiguous
    ):
        steps = amount * length + prefix
        value = np.arange(batch * (steps + extra) * 2).reshape(batch, -1, 2)
        args = (length, amount, prefix, extra == 0, contiguous)
        chunks = consec({"x": value}, *args)
        assert len(chunks) == amount
        assert all(chunk["x"].shape == (batch, prefix + length, 2) for chunk in chunks)
        joined = np.concatenate([chunk["x"][:, prefix:] for chunk in chunks], 1)
        np.testing.assert_array_equal(joined, value[:, prefix:steps])
        for index, chunk in enumerate(chunks):
            context = value[:, index * length : index * length + prefix]
            np.testing.assert_array_equal(chunk["x"][:, :prefix], context)
            assert chunk["x"].flags.c_contiguous or not contiguous

    def test_latents_of_the_context_go_to_the_first_chunk_and_zeros_to_the_others(self):
        deter = np.arange(1, 13).reshape(2, 2, 3).astype(ml_dtypes.bfloat16)
        sample = {"x": np.ones((2, 8)), "dyn/deter": deter}
        chunks = consec(sample, length=2, consec=3, prefix=2)
        np.testing.assert_array_equal(chunks[0]["dyn/deter"], deter)
        for chunk in chunks[1:]:
            assert chunk["dyn/deter"].dtype == deter.dtype
            np.testing.assert_array_equal(chunk["dyn/deter"], np.zeros_like(deter))

    def test_a_restored_sequence_does_not_need_its_source(self):
        samples = [{"x": np.arange(4)[None] + base} for base in (0, 10)]
        first = streams.Consec(streams.Stateless(iter(samples)), 1, 4)
        take(first, 2)
        state = through_checkpoint(first.save())
        second = streams.Consec(streams.Stateless(iter(samples[1:])), 1, 4)
        second.load(state)
        values = [chunk["x"].item() for chunk in second]
        assert values == [2, 3, 10, 11, 12, 13]

    @pytest.mark.parametrize(
        "sample",
        [
            {},
            {"x": np.zeros((2, 6))},
            {"x": np.zeros((2, 8))},
            {"x": np.zeros(7)},
            {"x": [[0] * 7] * 2},
            {"x": np.zeros((2, 7)), "y": np.zeros((3, 7))},
            {"x": np.zeros((2, 7)), "y": np.zeros((2, 2))},
            {"x": np.zeros((2, 1))},
            {"x": np.zeros((2, 7)), "consec": np.zeros((2, 7))},
            [np.zeros((2, 7))],
        ],
    )
    def test_refuses_samples_that_it_cannot_cut(self, sample):
        with pytest.raises(ValueError, match="Consec expected"):
            consec(sample, length=2, consec=3, prefix=1)

    def test_without_strict_longer_samples_are_fine_and_shorter_ones_are_not(self):
        args = {"length": 2, "consec": 3, "strict": False}
        assert len(consec({"x": np.zeros((2, 9))}, **args)) == 3
        with pytest.raises(ValueError, match=r"at least T=6 .* got shapes .*\(2, 5\)"):
            consec({"x": np.zeros((2, 5))}, **args)

    @pytest.mark.parametrize("args", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
    def test_refuses_impossible_settings(self, args):
        with pytest.raises(ValueError, match="Consec expected length"):
            streams.Consec(Count(), *args)

    def test_refuses_a_state_saved_with_other_settings(self):
        sample = {"x": np.zeros((1, 4))}
        first = streams.Consec(streams.Stateless(iter([sample])), 1, 4)
        take(first, 3)
        with pytest.raises(ValueError, match="chunk index between 1 and 1"):
            streams.Consec(Count(), 2, 2).load(first.save())
