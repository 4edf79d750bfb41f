"""The conformance suite of `Store`, run by each implementation's tests."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator

import pytest

from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.paced import PacedParts

PATIENCE_S = 60.0
MIB = 1 << 20


class StoreConformance:
    """Subclasses provide the fixture ``store``: empty, with a root of its own.

    ``large_bytes`` is a size that the store does not write in one piece.
    """

    large_bytes = 11 * MIB + 12_345

    def test_what_is_written_is_read(self, store: Store) -> None:
        parts = [os.urandom(n) for n in (0, 1, 3000, 70_000, 7)]
        data = b"".join(parts)
        assert store.write("a/b/file", parts) == len(data)
        assert store.read("a/b/file") == data
        assert store.size("a/b/file") == len(data)
        assert store.fetch("a/b/file")[0] == data

    def test_a_large_file_of_many_parts(self, store: Store) -> None:
        data = os.urandom(self.large_bytes)
        cuts = [0, 1, 5 * MIB - 1, 5 * MIB + 1, 10 * MIB, self.large_bytes]
        parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
        assert store.write("f", iter(parts)) == len(data)
        assert store.size("f") == len(data)
        assert store.read("f") == data
        file = store.open("f")
        assert file.nbytes == len(data)
        whole = bytearray(self.large_bytes)
        assert file.read_into([whole], 0) == len(data)
        assert whole == data
        file.close()

    @pytest.mark.parametrize("nbytes", [0, 100_000, 11 * MIB])
    def test_parts_with_a_pace_are_all_paid_for(self, store: Store, nbytes: int) -> None:
        paid, data = list[int](), os.urandom(nbytes)
        parts = PacedParts(data, pay=paid.append, bytes_per_s=1, piece_bytes=32 << 10)
        assert store.write("f", parts) == nbytes
        assert store.read("f") == data
        assert sum(paid) == nbytes
        assert max(paid, default=0) <= 32 << 10

    def test_a_pace_that_ends_leaves_the_old_file(self, store: Store) -> None:
        def pay(nbytes: int) -> None:
            raise StoreError("nobody needs it any more")

        store.write("f", [b"old"])
        parts = PacedParts(bytes(200_000), pay=pay, bytes_per_s=1, piece_bytes=32 << 10)
        with pytest.raises(StoreError, match="nobody needs it any more"):
            store.write("f", parts)
        assert store.read("f") == b"old"

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        assert store.write("f", []) == 0
        assert store.size("f") == 0
        assert store.read("f") == b""
        file = store.open("f")
        assert file.nbytes == 0
        assert file.read_into([bytearray(4)], 0) == 0
        file.close()

    def test_a_file_beyond_a_limit_is_not_read(self, store: Store) -> None:
        store.write("f", [b"12345"])
        assert store.read("f", most_bytes=5) == b"12345"
        with pytest.raises(CorruptError, match="5 bytes, such a file has at most 4"):
            store.read("f", most_bytes=4)

    def test_thousands_of_small_parts(self, store: Store) -> None:
        parts = [bytes([i % 256]) * (i % 5) for i in range(5000)]
        store.write("f", iter(parts))
        assert store.read("f") == b"".join(parts)

    def test_ranges_fill_buffer_after_buffer(self, store: Store) -> None:
        data = os.urandom(100_000)
        store.write("f", [data])
        file = store.open("f")
        one, none, two = bytearray(10), bytearray(0), bytearray(20)
        assert file.read_into([one, none, two], 2990) == 30
        assert one + two == data[2990:3020]
        file.close()

    def test_a_read_beyond_the_end_is_short(self, store: Store) -> None:
        store.write("f", [b"0123456789"])
        file, room = store.open("f"), bytearray(8)
        assert file.read_into([room], 7) == 3
        assert room == b"789\0\0\0\0\0"
        assert file.read_into([room], 10) == 0
        assert file.read_into([room], 1000) == 0
        assert file.read_into([], 0) == 0
        file.close()

    def test_threads_read_one_file_at_once(self, store: Store) -> None:
        data = os.urandom(300_000)
        store.write("f", [data])
        file, wrong = store.open("f"), list[int]()

        def read(start: int) -> None:
            for at in range(start, start + 50_000, 5_000):
                room = bytearray(5_000)
                if file.read_into([room], at) != 5_000 or room != data[at : at + 5_000]:
                    wrong.append(at)

        threads = [threading.Thread(target=read, args=(i * 50_000,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert wrong == []
        file.close()

    def test_names_are_those_directly_below(self, store: Store) -> None:
        for name in ("step-2/data/p", "step-2/manifest", "step-1/x", "step-10/x", "note"):
            store.write(name, [b"x"])
        assert store.names("") == ["note", "step-1", "step-10", "step-2"]
        assert store.names("step-2") == ["data", "manifest"]
        assert store.names("step-2/data") == ["p"]
        assert store.names("step") == []

    def test_names_with_other_characters(self, store: Store) -> None:
        name = "ordner ü/a+b %41 &=#?.pack"
        store.write(name, [b"x"])
        assert store.names("ordner ü") == ["a+b %41 &=#?.pack"]
        assert store.read(name) == b"x"
        store.delete([name])
        assert store.size(name) is None

    def test_what_is_not_there(self, store: Store) -> None:
        assert store.size("f") is None
        assert store.names("folder") == []
        store.delete(["f", "folder/g"])
        store.remove("folder")
        for action in (store.read, store.open, store.fetch):
            with pytest.raises(NotFoundError, match="/f: not there"):
                action("f")

    def test_writing_again_replaces(self, store: Store) -> None:
        store.write("f", [b"old and longer"])
        store.write("f", [b"new"])
        assert store.read("f") == b"new"

    def test_a_source_that_breaks_leaves_the_old_file(self, store: Store) -> None:
        store.write("d/f", [b"old"])

        def parts() -> Iterator[bytes]:
            yield os.urandom(self.large_bytes)
            raise KeyError("the source broke")

        with pytest.raises(KeyError):
            store.write("d/f", parts())
        assert store.read("d/f") == b"old"
        assert store.names("d") == ["f"]

    def test_a_file_under_way_is_not_there(self, store: Store) -> None:
        seen: list[object] = []

        def parts() -> Iterator[bytes]:
            yield os.urandom(self.large_bytes)
            seen.extend([store.size("d/f"), store.names("d")])
            yield b"end"

        store.write("d/f", parts())
        assert seen == [None, []]
        assert store.names("d") == ["f"]

    def test_a_file_is_created_once(self, store: Store) -> None:
        assert store.replace("d/f", b"one", expected=None)
        assert not store.replace("d/f", b"two", expected=None)
        assert store.read("d/f") == b"one"
        assert store.names("d") == ["f"]

    def test_a_file_is_replaced_at_its_version_only(self, store: Store) -> None:
        assert store.replace("f", b"one", expected=None)
        _, first = store.fetch("f")
        assert store.replace("f", b"two", expected=first)
        data, second = store.fetch("f")
        assert data == b"two"
        assert not store.replace("f", b"three", expected=first)
        assert store.read("f") == b"two"
        assert store.replace("f", b"three", expected=second)
        assert store.read("f") == b"three"

    def test_a_removed_file_is_absent_again(self, store: Store) -> None:
        assert store.replace("f", b"one", expected=None)
        _, version = store.fetch("f")
        store.delete(["f"])
        assert not store.replace("f", b"two", expected=version)
        assert store.size("f") is None
        assert store.replace("f", b"two", expected=None)

    def test_a_written_file_has_a_version(self, store: Store) -> None:
        store.write("f", [b"one"])
        _, version = store.fetch("f")
        assert store.replace("f", b"two", expected=version)
        store.write("f", [b"written"])
        assert not store.replace("f", b"three", expected=version)

    def test_of_racing_writers_one_wins(self, store: Store) -> None:
        rounds, racers = 4, 6
        wins: list[list[int]] = [[] for _ in range(rounds)]
        gate = threading.Barrier(racers)

        def race(racer: int) -> None:
            expected = None
            for turn in range(rounds):
                gate.wait(PATIENCE_S)
                if store.replace("f", f"{turn} {racer}".encode(), expected=expected):
                    wins[turn].append(racer)
                gate.wait(PATIENCE_S)
                expected = store.fetch("f")[1]

        threads = [threading.Thread(target=race, args=(i,)) for i in range(racers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert [len(winners) for winners in wins] == [1] * rounds
        assert store.read("f").decode() == f"{rounds - 1} {wins[-1][0]}"

    def test_files_are_deleted(self, store: Store) -> None:
        for name in ("d/a", "d/b", "d/c"):
            store.write(name, [b"x"])
        store.delete(iter(["d/a", "d/missing", "d/c"]))
        assert store.names("d") == ["b"]

    def test_a_folder_goes_when_no_file_is_left_in_it(self, store: Store) -> None:
        for name in ("step-1/a", "step-1/data/deep/b", "step-10/a", "step-1.json"):
            store.write(name, [b"x"])
        store.delete(["step-1/a"])
        store.remove("step-1")
        assert store.read("step-1/data/deep/b") == b"x"
        store.delete(["step-1/data/deep/b"])
        store.remove("step-1")
        assert store.names("") == ["step-1.json", "step-10"]
        store.remove("step-1")

    def test_a_sweep_leaves_files_alone(self, store: Store) -> None:
        store.write("d/f", [b"x"])
        store.sweep("d")
        assert store.names("d") == ["f"]

    def test_nothing_that_is_published_counts_as_begun(self, store: Store) -> None:
        store.write("d/f", [os.urandom(self.large_bytes)])
        store.replace("d/g", b"x", expected=None)
        assert store.unpublished("d") == []

    def test_a_sweep_leaves_a_living_writer_alone(self, store: Store) -> None:
        data = os.urandom(self.large_bytes)

        def parts() -> Iterator[bytes]:
            yield data
            store.sweep("d")
            yield b"end"

        assert store.write("d/f", parts()) == len(data) + 3
        assert store.read("d/f") == data + b"end"

    def test_where_names_root_and_file(self, store: Store) -> None:
        assert store.where("d/f") == f"{store.root}/d/f"
        assert store.where("") == store.root
