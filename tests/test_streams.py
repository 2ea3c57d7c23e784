from __future__ import annotations

import json
import threading
import traceback
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embodied import streams
from embodied.base import Stream

# Other work on the machine must not decide whether a test passes.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Count(Stream):
    """Yields start, start + 1, ... and ends before `limit`."""

    def __init__(self, start=0, limit=10**9):
        self.value = start
        self.limit = limit
        self.closed = 0

    def __next__(self):
        if self.value >= self.limit:
            raise StopIteration
        self.value += 1
        return self.value - 1

    def save(self):
        return {"value": self.value}

    def load(self, data):
        self.value = data["value"]

    def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert [x for x in threading.enumerate() if x.name == "prefetch"] == []


def take(stream, amount):
    """Returns the next items, with None in place of those after the end."""
    return [next(stream, None) for _ in range(amount)]


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
    @settings(unhurried, max_examples=20)
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

    @settings(unhurried, max_examples=30)
    @given(
        before=st.integers(0, 12),
        length=st.integers(1, 3),
        consec=st.integers(1, 4),
        prefix=st.integers(0, 2),
    )
    def test_consec_in_the_middle_of_a_sequence(self, before, length, consec, prefix):
        check_restores(("consec", ("count", 0, 6), length, consec, prefix), before, 9)

    @settings(unhurried, max_examples=60)
    @given(recipes, st.integers(0, 7), st.integers(1, 7))
    def test_random_nestings(self, recipe, before, after):
        check_restores(recipe, before, after)

    @pytest.mark.slow
    @settings(unhurried, max_examples=3000)
    @given(recipes, st.integers(0, 30), st.integers(1, 30))
    def test_random_nestings_in_long_rounds(self, recipe, before, after):
        check_restores(recipe, before, after)

    @given(recipe=recipes, amount=st.integers(1, 8))
    @settings(unhurried, max_examples=30)
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

    @unhurried
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


def explode():
    raise KeyError("inside the source")


class Failing(Count):
    """Counts, and fails once it has reached the limit."""

    def __next__(self):
        return explode() if self.value >= self.limit else super().__next__()


class Gated(Count):
    """Counts, but every item waits until the gate is open."""

    def __init__(self):
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()

    def __next__(self):
        self.entered.set()
        assert self.gate.wait(60)
        return super().__next__()


class TestPrefetch:
    @given(amount=st.integers(1, 4), limit=st.integers(0, 6))
    @unhurried
    def test_delivers_all_items_in_order_and_then_the_end(self, amount, limit):
        with streams.Prefetch(Count(limit=limit), lambda x: 2 * x, amount) as stream:
            assert list(stream) == [2 * value for value in range(limit)]
            assert next(stream, "end") == "end"

    def test_no_thread_runs_before_the_first_use(self):
        before = threading.active_count()
        with streams.Prefetch(Count()) as stream:
            assert threading.active_count() == before
            iter(stream)
            assert threading.active_count() == before + 1

    def test_transforms_in_another_thread(self):
        def thread(_):
            return threading.get_ident()

        with streams.Prefetch(Count(), thread) as stream:
            assert next(stream) != threading.get_ident()

    @pytest.mark.parametrize("amount", [1, 3])
    def test_fetches_ahead_as_many_items_as_it_may_and_no_more(self, amount):
        source = Count()
        full = threading.Event()

        def watch(item):
            if item == 2 + amount - 1:
                full.set()
            return item

        with streams.Prefetch(source, watch, amount) as stream:
            take(stream, 2)
            assert full.wait(60)
        assert source.value == 2 + amount

    def test_hands_over_an_error_with_its_traceback_after_the_items_before_it(self):
        with streams.Prefetch(Failing(limit=2), amount=3) as stream:
            assert take(stream, 2) == [0, 1]
            with pytest.raises(KeyError, match="inside the source") as caught:
                next(stream)
        lines = traceback.format_exception(caught.value)
        assert any("in explode" in line for line in lines), lines

    def test_raises_the_error_again_at_every_later_call(self):
        lengths = []
        with streams.Prefetch(Failing(limit=0)) as stream:
            for _ in range(3):
                with pytest.raises(KeyError) as caught:
                    next(stream)
                lengths.append(len(traceback.format_exception(caught.value)))
        assert lengths[0] == lengths[1] == lengths[2]

    def test_hands_over_an_error_of_the_transform(self):
        with streams.Prefetch(Count(), lambda item: 1 // item) as stream:
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    next(stream)

    def test_an_error_passes_two_prefetches(self):
        inner = streams.Prefetch(Failing(limit=1))
        with streams.Prefetch(inner, amount=2) as stream:
            assert next(stream) == 0
            with pytest.raises(KeyError) as caught:
                next(stream)
        assert "in explode" in "".join(traceback.format_exception(caught.value))

    def test_goes_on_after_an_error_from_a_saved_position(self):
        source = Failing(limit=2)
        with streams.Prefetch(source, amount=2) as stream:
            take(stream, 2)
            with pytest.raises(KeyError):
                next(stream)
            source.limit = 99
            stream.load(stream.save())
            assert take(stream, 2) == [2, 3]

    def test_closes_with_a_full_queue(self):
        full = threading.Event()
        source = Count()
        stream = streams.Prefetch(source, lambda _: full.set())
        iter(stream)
        assert full.wait(60)
        stream.close()
        assert source.closed == 1
        stream.close()

    def test_closing_lets_the_source_complete_one_item_only(self):
        source = Gated()
        stream = streams.Prefetch(source, amount=5)
        iter(stream)
        assert source.entered.wait(60)
        closer = threading.Thread(target=stream.close)
        closer.start()
        with pytest.raises(RuntimeError, match="Prefetch is closed"):
            next(stream)
        source.gate.set()
        closer.join(60)
        assert not closer.is_alive()
        assert source.value == 1

    def test_closing_wakes_a_reader_that_waits(self):
        source = Gated()
        stream = streams.Prefetch(source)
        iter(stream)
        errors = []

        def read():
            try:
                next(stream)
            except RuntimeError as error:
                errors.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        closer = threading.Thread(target=stream.close)
        closer.start()
        reader.join(60)  # While the source is still at it.
        assert len(errors) == 1
        assert "closed" in errors[0]
        source.gate.set()
        closer.join(60)

    def test_gives_up_on_a_source_that_never_returns(self, monkeypatch):
        monkeypatch.setattr(streams, "CLOSE_SECONDS", 0.05)
        source = Gated()
        stream = streams.Prefetch(source)
        iter(stream)
        assert source.entered.wait(60)
        with pytest.raises(TimeoutError, match="Prefetch waited"):
            stream.close()
        source.gate.set()
        monkeypatch.setattr(streams, "CLOSE_SECONDS", 60)
        stream.close()

    def test_after_close_the_position_is_kept_and_load_restarts(self):
        with streams.Prefetch(Count(), amount=3) as stream:
            take(stream, 4)
            stream.close()
            with pytest.raises(RuntimeError, match="Only `load` starts it again"):
                next(stream)
            stream.load(stream.save())
            assert take(stream, 2) == [4, 5]

    def test_refuses_to_fetch_nothing_ahead(self):
        with pytest.raises(ValueError, match="amount >= 1, got 0"):
            streams.Prefetch(Count(), amount=0)
