"""A stranger's pickle: plain data as `pickle` reads it, everything else refused, quickly, by name, nothing executed."""

import collections
import decimal
import io
import json
import pickle
import random
import time
import zipfile

import pytest

from gpt2.memory.reading.safe_pickle import Limits, SnapshotError, loads
from gpt2.memory.snapshot import read, to_trace
from gpt2.memory.summary import summary
from tests import recordings

P4 = b"\x80\x04"
EXECUTED = []


def fire(*_):
    EXECUTED.append(1)
    return {}


class Reduces:
    def __reduce__(self):
        return fire, ("now",)


class Built:
    def __setstate__(self, state):
        fire()


class Persistent(pickle.Pickler):
    def persistent_id(self, obj):
        return "tag" if isinstance(obj, Built) else None


def persistent(protocol):
    file = io.BytesIO()
    Persistent(file, protocol).dump([Built()])
    return file.getvalue()


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps({}))
    return file.getvalue()


def chain(depth):
    """Lists in lists by way of the memo: the stack stays low."""
    links = [n.to_bytes(4, "little") for n in range(depth)]
    steps = [b"\x8c\x01k]r" + new + b"j" + old + b"a" for old, new in zip(links, links[1:], strict=False)]
    return P4 + b"}(\x8c\x01k]r" + links[0] + b"".join(steps) + b"u."


HOSTILE = {
    **{f"reduce, protocol {p}": (pickle.dumps(Reduces(), p), "GLOBAL") for p in (2, 3, 4, 5)},
    "global": (b"\x80\x02cos\nsystem\n(S'true'\ntR.", "os.system"),
    "stack_global": (P4 + b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "os.system"),
    "inst": (b"\x80\x02(S'true'\nios\nsystem\n.", "STRING"),
    "inst without string": (b"\x80\x02(ios\nsystem\n.", "os.system"),
    "obj": (b"\x80\x02(K\x01o.", "OBJ"),
    "newobj": (pickle.dumps(Built(), 2), "GLOBAL"),
    "newobj of a dict": (P4 + b"})\x81.", "NEWOBJ"),
    "newobj_ex": (P4 + b"})}\x92.", "NEWOBJ_EX"),
    "build": (P4 + b"}}b.", "BUILD"),
    "reduce alone": (P4 + b"})R.", "REDUCE"),
    "ext1": (b"\x80\x02\x82\x01.", "EXT1"),
    "ext2": (b"\x80\x02\x83\x01\x00.", "EXT2"),
    "ext4": (b"\x80\x02\x84\x01\x00\x00\x00.", "EXT4"),
    "persid": (b"\x80\x02Ptag\n.", "PERSID"),
    "binpersid": (persistent(4), "BINPERSID"),
    "set": (pickle.dumps({1, 2}, 4), "EMPTY_SET"),
    "frozenset": (pickle.dumps(frozenset([1]), 4), "FROZENSET"),
    "bytes": (pickle.dumps(b"x", 4), "BINBYTES"),
    "bytearray that announces 2^62": (b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".", "BYTEARRAY8"),
    "decimal": (pickle.dumps(decimal.Decimal(1), 4), "decimal"),
    "ordered dict": (pickle.dumps(collections.OrderedDict(a=1), 4), "OrderedDict"),
    "buffer, protocol 5": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "read-only buffer": (b"\x80\x05\x97\x98.", "NEXT_BUFFER"),
    "dup": (P4 + b"]2.", "DUP"),
    "pop": (P4 + b"]]0.", "POP"),
    "million lists open": (P4 + b"]" * 1_000_000 + b"a" * 999_999 + b".", "stack|containers"),
    "million marks": (P4 + b"(" * 1_000_000 + b".", "open at once"),
    "tuples in tuples": (P4 + b")" + b"\x85" * 5_000 + b".", "deep"),
    "lists in lists by memo": (chain(3_000), "deep"),
    "lists in one list": (P4 + b"]" + b"]a" * 1_000_000 + b".", "containers"),
    "numbers on the stack": (P4 + b"K\x01" * 5_000_000 + b".", "stack"),
    "integer that announces 2 GiB": (P4 + b"\x8b\xff\xff\xff\x7f.", "LONG4"),
    "integer of 255 bytes": (P4 + b"\x8a\xff" + b"\xff" * 255 + b".", "255 bytes"),
    "integer in digits": (b"\x80\x02L" + b"9" * 100_000 + b"L\n.", "LONG"),
    "string that announces 2^62": (P4 + b"\x8d" + (2**62).to_bytes(8, "little") + b".", "announced"),
    "string that announces 4 GiB": (P4 + b"X\xff\xff\xff\xff.", "announced"),
    "string longer than the file": (P4 + b"X\xff\xff\x00\x00abc.", "truncated"),
    "broken UTF-8": (P4 + b"\x8c\x02\xff\xff.", "UTF-8"),
    "list as key": (P4 + b"}]K\x01s.", "key"),
    "integer as key": (P4 + b"}K\x01K\x01s.", "key"),
    "key without a value": (P4 + b"}(\x8c\x01au.", "key"),
    "append to a dict": (P4 + b"}K\x01a.", "append"),
    "set item of a list": (P4 + b"]\x8c\x01aK\x01s.", "items"),
    "memo that is not there": (P4 + b"h\x07.", "refers"),
    "memo with a huge number that is not there": (P4 + b"j\xff\xff\xff\xff.", "refers"),
    "nothing on the stack": (P4 + b"\x94.", "ends too soon"),
    "no mark": (P4 + b"t.", "ends too soon"),
    "stop at once": (P4 + b".", "left"),
    "two results": (P4 + b"NN.", "left"),
    "something after the end": (P4 + b"}." + b"x" * 10, "follow"),
    "protocol 6": (b"\x80\x06}.", "protocol 6"),
    "protocol 1 announced": (b"\x80\x01}.", "protocol 1"),
    "protocol 0": (pickle.dumps({"segments": []}, 0), "not a pickle"),
    "unknown instruction": (P4 + b"\xff.", "code 255"),
    "torch.save": (zipped(), "zip"),
    "gzip": (b"\x1f\x8b\x08\x00", "gzip"),
    "empty": (b"", "empty"),
    "text": (b"Traceback (most recent call last):", "not a pickle"),
    "json": (json.dumps({"segments": []}).encode(), "not a pickle"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_under_a_second_with_one_clear_line(name, tmp_path):
    data, says = HOSTILE[name]
    (file := tmp_path / "x.pickle").write_bytes(data)
    begun = time.process_time()
    with pytest.raises(SnapshotError, match=says) as refused:
        read(file)
    assert time.process_time() - begun < 1.0
    assert isinstance(refused.value, ValueError) and str(refused.value).startswith(str(file))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert not EXECUTED


def test_the_payloads_would_have_run():
    """The test above means something: `pickle` does execute them."""
    pickle.loads(HOSTILE["reduce, protocol 4"][0])
    assert EXECUTED.pop() == 1
    pickle.loads(pickle.dumps(Built(), 2).replace(b".", b"}\x8c\x01aK\x01sb."))
    assert EXECUTED.pop() == 1


PLAIN = {"a": [None, True, False, 0, 1, 255, 256, 65535, 65536, -1, -129, 2**31 - 1, -2**31, 2**31, 2**48, 2**63,
               2**64 - 1, 1.5, float("inf"), "", "é" * 300, "x" * 70_000, "\ud800", (), (1,), (1, 2), (1, 2, 3),
               (1, 2, 3, 4), [[]], {}]}
PLAIN["shared"] = [PLAIN["a"], PLAIN["a"]]
PLAIN["many"] = [{"n": n} for n in range(3000)]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("pickler", [pickle.dumps, pickle._dumps], ids=["C", "Python"])
def test_plain_data_is_what_pickle_makes_of_it(protocol, pickler):
    data = pickler(PLAIN, protocol)
    ours = loads(data)
    assert ours == pickle.loads(data) == PLAIN
    assert ours["shared"][0] is ours["shared"][1]


def test_truncation_at_every_byte_is_refused():
    data = pickle.dumps({"segments": [{"a": 1, "b": "text", "c": 2**50}], "device_traces": [[1.5, None]]}, 4)
    for length in range(len(data)):
        with pytest.raises(SnapshotError):
            loads(data[:length])


def test_limits_are_what_they_say(tmp_path):
    data = pickle.dumps([[]] * 3, 4)
    (file := tmp_path / "x").write_bytes(data)
    with pytest.raises(SnapshotError, match="bytes; at most"):
        read(file, Limits(file_bytes=3))
    with pytest.raises(SnapshotError, match="deep"):
        loads(pickle.dumps([[[[1]]]]), Limits(depth=2))
    assert loads(pickle.dumps([[[[1]]]]), Limits(depth=4)) == [[[[1]]]]
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "not there")
    with pytest.raises(SnapshotError, match="memory snapshot"):
        read(file)


def test_an_entry_repeated_a_million_times_is_refused():
    event = {"action": "alloc", "addr": 512, "size": 512, "stream": 0}
    data = pickle.dumps({"segments": [], "device_traces": [[event] * 1_000_000]}, 4)
    assert len(data) < 2_100_000
    begun = time.process_time()
    with pytest.raises(SnapshotError, match="more than once"):
        to_trace(loads(data))
    assert time.process_time() - begun < 1.0


def _mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) + 1)
        what = rng.randrange(4)
        if what == 0:
            changed[at:at + 1] = bytes([rng.randrange(256)])
        elif what == 1:
            changed[at:at] = bytes([rng.randrange(256)]) * rng.choice((1, 3, 50))
        elif what == 2:
            del changed[at:at + rng.choice((1, 2, 8, 100))]
        else:
            start = rng.randrange(len(changed) + 1)
            changed[at:at] = changed[start:start + rng.randrange(60)]
    return bytes(changed)


@pytest.mark.parametrize("seed", [0, 1])
def test_mutated_snapshots_end_in_a_trace_or_in_our_own_error(seed):
    rng = random.Random(seed)
    small = recordings.snapshot(recordings.load("base8"), keep=60)
    del small["segments"][5:]
    originals = [pickle.dumps(small, p) for p in (2, 4)]
    read_back = refused = 0
    for _ in range(1500):
        try:
            snapshot = loads(_mutated(rng.choice(originals), rng))
            if isinstance(snapshot, dict):
                trace = to_trace(snapshot)
                summary(trace) if trace.events else None
            read_back += 1
        except SnapshotError as error:
            assert "\n" not in str(error)
            refused += 1
    assert read_back > 10 and refused > 1000
