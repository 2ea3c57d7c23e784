from __future__ import annotations

import concurrent.futures
import datetime
import json
import math
import os
import pickle
import struct
import tempfile
from collections import OrderedDict, namedtuple
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_testing import files_below, same
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embodied.checkpoint import (
    Checkpoint,
    CheckpointError,
    FileRecord,
    load_tree,
    save_tree,
    write_file,
)
from embodied.checkpoint.files import HashedReader, next_tag, seal

EXTENSIONS = [
    np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
]
TIMES = st.datetimes(min_value=datetime.datetime(1970, 1, 2))


def arrays():
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
    kinds = st.sampled_from("?bhilBHILefdFD").map(np.dtype)
    kinds |= kinds.map(lambda dtype: dtype.newbyteorder(">"))
    plain = hnp.arrays(kinds, shapes)
    raw = hnp.arrays(np.uint32, shapes)
    small = st.builds(lambda x, kind: x.astype(kind), raw, st.sampled_from(EXTENSIONS))
    turned = plain.map(np.transpose)
    mirrored = plain.filter(np.ndim).map(lambda x: x[..., ::-1])
    return st.one_of(plain, turned, mirrored, small)


def trees():
    text = st.text(st.characters(codec=None), max_size=5)
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        text,
        st.binary(max_size=20),
        arrays(),
        arrays().filter(np.size).map(lambda x: x.reshape(-1)[0]),
    )
    return st.recursive(
        leaves,
        lambda children: st.one_of(
            st.lists(children, max_size=4),
            st.lists(children, max_size=4).map(tuple),
            st.dictionaries(text, children, max_size=4),
        ),
        max_leaves=12,
    )


@pytest.fixture
def checkpoint(tmp_path):
    return Checkpoint(tmp_path)


class TestTrees:
    @settings(max_examples=60)
    @given(trees())
    def test_random_trees_come_back_the_same(self, tree):
        with tempfile.TemporaryDirectory() as root:
            records = save_tree(root, "some/tree", tree)
            assert same(load_tree(root, "some/tree", records), tree)
            assert same(load_tree(root, "some/tree"), tree)
            assert files_below(root) == {record.path for record in records}

    @pytest.mark.parametrize(
        "value",
        [
            np.arange(24.0).reshape(2, 3, 4)[:, ::2, ::-1],
            np.asfortranarray(np.arange(6).reshape(2, 3)),
            np.arange(5, dtype=">i4"),
            np.array([1 + 2j], ">c16"),
            np.array(3.5, ml_dtypes.bfloat16),
            np.array([1.5, -2.0], ml_dtypes.float8_e4m3fn),
            np.array([1, 2, 3], np.longdouble) / 3,
            np.zeros((0, 7), np.complex64),
            np.zeros((3, 0, 2**40), np.int8),
            np.float64(0.1),
            np.float16("nan"),
            np.bool_(True),
            np.int64(-1),
            ml_dtypes.bfloat16(1.5),
            np.longdouble(1) / 3,
            math.nan,
            -math.inf,
            -0.0,
            5e-324,
            struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf0\xff")[0],
            2**63 - 1,
            -(2**63),
            2**20000,
            -(10**5000),
            "\ud83d\ude00 \ud800",
            b"\x00\xff",
            {"": {"": ()}, "b": [], "a": {}},
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_edge_cases_come_back_the_same(self, tmp_path, value):
        save_tree(tmp_path, "x", value)
        assert same(load_tree(tmp_path, "x"), value)

    def test_keys_that_read_alike_stay_apart(self, tmp_path):
        one = np.ones(1)
        tree = {
            "a/b": one,
            "a": {"b": 2 * one, "b~2": 3 * one},
            "__metadata__": 4 * one,
            "../x": 5 * one,
            "\ud800": 6 * one,
            "?": 7 * one,
        }
        save_tree(tmp_path, "x", tree)
        assert same(load_tree(tmp_path, "x"), tree)
        stored = safetensors.numpy.load_file(tmp_path / "x.safetensors")
        assert sorted(stored.values()) == [1, 2, 3, 4, 5, 6, 7]

    def test_loaded_arrays_can_be_written_to(self, tmp_path):
        save_tree(tmp_path, "x", [np.zeros(3), np.zeros(3, ">f4")])
        for array in load_tree(tmp_path, "x"):
            array += 1
            assert array.tolist() == [1, 1, 1]

    def test_arrays_are_readable_by_the_safetensors_library(self, tmp_path):
        tree = {
            "params": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
            "big": np.arange(3, dtype=">i8"),
            "brain": np.array([1.5, 2.5], ml_dtypes.bfloat16),
            "flags": [np.array([True, False]), np.zeros((0, 2), np.float16)],
            "complex": np.ones((2, 2), np.complex128),
        }
        save_tree(tmp_path, "x", tree)
        found = safetensors.numpy.load_file(tmp_path / "x.safetensors")
        assert same(found["params/w"], tree["params"]["w"])
        assert same(found["big"], tree["big"].astype("<i8"))
        assert same(found["brain"].view(ml_dtypes.bfloat16), tree["brain"])
        assert same(found["flags/0"], tree["flags"][0])
        assert found["complex"].shape == (2, 2, 16)

    @pytest.mark.parametrize(
        ("value", "kind"),
        [
            (np.array([object()]), "object"),
            (np.array(["text"]), "<U4"),
            (np.zeros(2, "M8[s]"), "datetime64"),
            (np.zeros(2, "i4,f4"), "i4"),
            (np.zeros(1, np.dtype(ml_dtypes.bfloat16).newbyteorder(">")), ">V2"),
            (np.ma.masked_array([1]), "MaskedArray"),
            (np.str_("x"), "<U1"),
            (OrderedDict(a=1), "OrderedDict"),
            (namedtuple("Point", "x")(1), "Point"),
            ({1, 2}, "set"),
            (lambda: None, "function"),
            (bytearray(b"x"), "bytearray"),
            (1j, "complex"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_other_types_are_refused_by_place_and_type(self, tmp_path, value, kind):
        with pytest.raises(CheckpointError, match=r"tree\['a'\]\[1\].*" + kind):
            save_tree(tmp_path, "x", {"a": [0, value]})
        assert not files_below(tmp_path)

    def test_keys_other_than_str_are_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"tree\['a'\].*keys.*3 \(int\)"):
            save_tree(tmp_path, "x", {"a": {3: 0}})

    def test_a_tree_that_holds_itself_is_refused(self, tmp_path):
        tree: list = []
        tree.append(tree)
        with pytest.raises(CheckpointError, match="holds itself"):
            save_tree(tmp_path, "x", tree)

    def test_nothing_is_unpickled(self, tmp_path):
        class Attack:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "attacked"),)

        payload = pickle.dumps(Attack())
        for name in ("x.json", "x.safetensors"):
            save_tree(tmp_path, "x", {"a": np.ones(3)})
            (tmp_path / name).write_bytes(payload)
            with pytest.raises(CheckpointError, match=name):
                load_tree(tmp_path, "x")
        assert not (tmp_path / "attacked").exists()
        pickle.loads(payload)
        assert (tmp_path / "attacked").exists(), "the payload must be a working one"

    @pytest.mark.parametrize(
        "node",
        [
            {"pickle": "gASVAA=="},
            {"array": 7},
            {"scalar": ["|O", "00"]},
            {"scalar": ["<f4", "00"]},
            {"list": 3},
            {},
            [1],
            {"int": "xyz"},
        ],
    )
    def test_forged_structures_are_refused(self, tmp_path, node):
        (arrays, _) = save_tree(tmp_path, "x", None)
        content = {"format": 1, "arrays": [], "tree": node}
        content |= {"size": arrays.size, "digest": arrays.digest}
        (tmp_path / "x.json").write_bytes(seal(content))
        with pytest.raises(CheckpointError, match=r"x.json"):
            load_tree(tmp_path, "x")

    def test_a_forged_shape_allocates_nothing(self, tmp_path):
        (arrays, _) = save_tree(tmp_path, "x", np.ones(1))
        content = {"format": 1, "arrays": [["x", "<f8", [2**60]]], "tree": None}
        content |= {"size": arrays.size, "digest": arrays.digest}
        (tmp_path / "x.json").write_bytes(seal(content))
        with pytest.raises(CheckpointError, match=r"x.safetensors is damaged: it has"):
            load_tree(tmp_path, "x")

    def test_whole_files_of_another_save_do_not_fit_the_records(self, tmp_path):
        records = save_tree(tmp_path, "x", {"a": np.zeros(3)})
        save_tree(tmp_path, "x", {"a": np.ones(3)})
        with pytest.raises(CheckpointError, match=r"x.json is damaged: its digest"):
            load_tree(tmp_path, "x", records)


class TestFiles:
    @given(st.lists(st.binary(max_size=100)))
    def test_a_file_holds_its_buffers(self, buffers):
        with tempfile.TemporaryDirectory() as root:
            record = write_file(root, "a/b", iter(buffers))
            assert Path(root, "a/b").read_bytes() == b"".join(buffers)
            assert record.size == sum(map(len, buffers))
            assert (
                FileRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
            )

    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self, tmp_path):
        write_file(tmp_path, "x", b"old")

        def interrupted():
            yield b"new"
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_file(tmp_path, "x", interrupted())
        assert files_below(tmp_path) == {"x"}
        assert (tmp_path / "x").read_bytes() == b"old"

    @pytest.mark.parametrize(
        "path",
        ["", ".", "..", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0"],
    )
    def test_paths_that_leave_the_root_are_refused(self, tmp_path, path):
        with pytest.raises(CheckpointError, match="relative to the root"):
            write_file(tmp_path / "root", path, b"")
        record = {"path": path, "size": 0, "digest": "sha256:" + 64 * "0"}
        with pytest.raises(CheckpointError, match="relative to the root"):
            FileRecord.from_json(record | {"required": True})

    def test_links_below_the_root_are_refused(self, tmp_path):
        root, outside = tmp_path / "root", tmp_path / "outside"
        root.mkdir()
        outside.mkdir()
        (root / "link").symlink_to(outside)
        (root / "loop").symlink_to(root / "loop")
        for path in ("link/x", "link", "loop/x"):
            with pytest.raises(CheckpointError):
                write_file(root, path, b"")
        assert not files_below(outside)

    def test_a_file_that_shrinks_while_it_is_read_is_truncated(self, tmp_path):
        record = write_file(tmp_path, "x", b"12345678")
        with HashedReader(tmp_path, "x") as reader:
            os.truncate(tmp_path / "x", 3)
            with pytest.raises(CheckpointError, match="truncated: it ends after 3"):
                reader.check(record)

    def test_a_file_that_grows_while_it_is_read_is_damaged(self, tmp_path):
        record = write_file(tmp_path, "x", b"12345678")
        with HashedReader(tmp_path, "x") as reader:
            with (tmp_path / "x").open("ab") as file:
                file.write(b"9")
            reader.read()
            with pytest.raises(CheckpointError, match="it has 9 bytes, expected 8"):
                reader.check(record)

    def test_the_root_may_be_a_link(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "root").symlink_to(tmp_path / "real")
        checkpoint = Checkpoint(tmp_path / "root")
        checkpoint.save({"agent": 1})
        checkpoint.clean()
        assert checkpoint.load() == ({"agent": 1}, {})


class TestCommits:
    def test_what_is_saved_is_loaded(self, checkpoint):
        assert checkpoint.load() is None and not checkpoint.exists()
        for step in range(5):
            parts = {"agent": {"w": np.full(3, step)}, "replay/00001": (step,)}
            checkpoint.save(parts, {"step": step})
            found, meta = checkpoint.load()
            assert same(found, parts) and meta == {"step": step}
        assert checkpoint.exists()

    def test_several_writers_make_one_cut(self, tmp_path, checkpoint):
        tag = checkpoint.new_tag()
        other = Checkpoint(tmp_path)
        records = checkpoint.write_part(tag, "agent", {"w": np.ones(2)})
        records += other.write_part(tag, "logger", {"step": 7})
        records.append(write_file(tmp_path, "replay/chunk", b"data", required=False))
        assert other.newest() is None, "nothing counts before the commit"
        checkpoint.commit(tag, records, {"step": 7})
        manifest = other.newest()
        assert manifest.tag == tag and manifest.meta == {"step": 7}
        assert set(manifest.files) == set(records)
        assert other.parts(manifest) == ["agent", "logger"]
        assert other.read_part(manifest, "logger") == {"step": 7}
        with pytest.raises(CheckpointError, match=r"no part 'env', only \['agent'"):
            other.read_part(manifest, "env")

    def test_the_manifest_file_is_the_newest_and_older_ones_are_archived(
        self, tmp_path, checkpoint
    ):
        tags = [checkpoint.save({"agent": step}) for step in range(2)]
        data = (tmp_path / "ckpt/manifest.json").read_bytes()
        assert json.loads(data)["content"]["tag"] == tags[1]
        names = sorted(path.stem for path in (tmp_path / "ckpt/manifests").iterdir())
        assert names == tags

    def test_a_commit_with_a_missing_or_torn_file_is_refused(
        self, tmp_path, checkpoint
    ):
        checkpoint.save({"agent": 0})
        tag = checkpoint.new_tag()
        records = checkpoint.write_part(tag, "agent", 1)
        path = tmp_path / records[0].path
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=records[0].path + " is damaged"):
            checkpoint.commit(tag, records)
        path.unlink()
        with pytest.raises(CheckpointError, match=records[0].path + " is missing"):
            checkpoint.commit(tag, records)
        assert checkpoint.load() == ({"agent": 0}, {})

    def test_a_lost_chunk_does_not_stop_commits(self, tmp_path, checkpoint, caplog):
        chunk = write_file(tmp_path, "replay/chunk", b"data", required=False)
        (tmp_path / chunk.path).unlink()
        tag = checkpoint.new_tag()
        checkpoint.commit(tag, [*checkpoint.write_part(tag, "agent", 1), chunk])
        assert "replay/chunk is missing" in caplog.text
        assert checkpoint.load() == ({"agent": 1}, {})

    def test_a_committed_tag_never_changes(self, checkpoint):
        tag = checkpoint.save({"agent": 0})
        with pytest.raises(CheckpointError, match="is committed"):
            checkpoint.write_part(tag, "agent", 1)
        with pytest.raises(CheckpointError, match="newer than the last commit"):
            checkpoint.commit(tag, [])
        checkpoint.discard(tag)
        assert checkpoint.load() == ({"agent": 0}, {})

    def test_two_records_of_one_file_must_agree(self, tmp_path, checkpoint):
        first = write_file(tmp_path, "x", b"1")
        second = write_file(tmp_path, "x", b"2")
        with pytest.raises(CheckpointError, match="Two different records of x"):
            checkpoint.commit(checkpoint.new_tag(), [first, second])
        assert checkpoint.commit(checkpoint.new_tag(), [second, second]).files == (
            second,
        )

    def test_meta_that_is_no_dict_is_refused(self, checkpoint):
        with pytest.raises(CheckpointError, match="Expected meta"):
            checkpoint.save({"agent": 0}, [1])
        assert checkpoint.newest() is None

    @pytest.mark.parametrize(
        "name", ["", "../x", "/x", "manifests", ".hidden", "a//b", "a\n"]
    )
    def test_odd_part_names_are_refused(self, checkpoint, name):
        with pytest.raises(CheckpointError, match="part name"):
            checkpoint.write_part(checkpoint.new_tag(), name, 0)

    @pytest.mark.parametrize("tag", ["", "../x", "20250101T000000000000-1", None])
    def test_odd_tags_are_refused(self, checkpoint, tag):
        with pytest.raises(CheckpointError, match="Expected a tag"):
            checkpoint.write_part(tag, "agent", 0)
        with pytest.raises(CheckpointError, match="Expected a tag"):
            checkpoint.commit(tag, [])

    def test_threads_save_one_after_the_other(self, checkpoint):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            tags = set(pool.map(lambda x: checkpoint.save({"agent": x}), range(12)))
        assert len(tags) == 12
        assert checkpoint.newest().tag == max(tags)

    def test_tags_grow_over_instances_and_uncommitted_parts(self, tmp_path):
        tags = []
        for _ in range(5):
            checkpoint = Checkpoint(tmp_path)
            tags += [checkpoint.new_tag(), checkpoint.new_tag()]
            checkpoint.write_part(tags[-1], "agent", 0)
        assert tags == sorted(set(tags))
        assert [int(tag.split("-")[1]) for tag in tags] == [*range(1, 11)]

    @given(TIMES, TIMES)
    def test_tags_grow_when_the_clock_is_set_back(self, first, second):
        previous = next_tag(None, first.replace(tzinfo=datetime.UTC))
        assert next_tag(previous, second.replace(tzinfo=datetime.UTC)) > previous


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="keep at least 1"):
        Checkpoint(tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="relative to the root"):
        Checkpoint(tmp_path, folder="../ckpt")
