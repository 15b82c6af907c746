"""The allocator against recordings of a real GPU, rule by rule, and at random."""

import gzip
import json
import pickle
import random
import time
from pathlib import Path

import pytest

from gpt2.memory.allocator import (
    CachingAllocator,
    Driver,
    OutOfMemory,
    ReplayDriver,
    Settings,
    format_size,
    round_size,
    segment_size,
)

MiB, GiB = 2**20, 2**30
NATIVE = ("base8", "bf16", "sdpabf16", "ckpt")
EXPANDABLE = Settings(expandable_segments=True)


# ---- recordings ----

def recording(name):
    return json.loads(gzip.decompress((Path(__file__).parent / "traces" / f"{name}.json.gz").read_bytes()))


def setup(document, driver=None):
    """An allocator like the recorded one, and the list it writes its events to."""
    rec, first = document["rec"], document["events"][0][0]
    given = [e[1] for e in document["events"] if e[0] == "segment_alloc"]
    if first == "segment_map":  # the two pools reserve their ranges where their first pages are
        given = [min(e[1] for e in document["events"] if e[0] == "segment_map" and (e[1] < 2**36) == small)
                 for small in (True, False)]
    driver = driver or ReplayDriver(given, rec["total"], rec["free"])
    events = []
    settings = EXPANDABLE if first == "segment_map" else Settings()
    limit = rec["cap_mib"] * MiB or None
    return CachingAllocator(driver, settings=settings, limit_bytes=limit, record=lambda *e: events.append(e)), events


def replay(document, allocator, each=lambda: None):
    """Feed the recorded requests and frees; return how many blocks landed elsewhere."""
    missed, ours = 0, {}
    for action, address, size, stream, _ in document["events"]:
        if action == "alloc":
            ours[address] = allocator.malloc(size, stream)
            missed += ours[address] != address
        elif action == "free_requested":
            allocator.free(ours.pop(address))
        each()
    return missed


@pytest.mark.parametrize("name", [*NATIVE, "base20exp"])
def test_replay_lands_every_block_on_its_address(name):
    document = recording(name)
    allocator, events = setup(document)
    assert replay(document, allocator) == 0
    ours = [e[:3] for e in events if e[0].startswith("segment")]
    assert ours == [tuple(e[:3]) for e in document["events"] if e[0].startswith("segment")]
    order = [e[0] for e in document["events"] if e[0] != "free_completed"]
    assert [{"free": "free_requested"}.get(e[0], e[0]) for e in events] == order


@pytest.mark.parametrize("name", [*NATIVE, "base20exp"])
def test_replay_ends_in_the_recorded_segments(name):
    document = recording(name)
    allocator, _ = setup(document)
    replay(document, allocator)
    theirs = [(s["address"], s["total"], s["type"], [tuple(b) for b in s["blocks"]]) for s in document["segments"]]
    assert [(s.address, s.total_bytes, s.kind, [b[1:] for b in s.blocks]) for s in allocator.segments()] == theirs


@pytest.mark.parametrize("name", [*NATIVE, "base20exp"])
def test_replay_passes_every_recorded_line_and_ends_in_the_recorded_statistics(name):
    document = recording(name)
    allocator, _ = setup(document)
    lines = list(document["rec"]["lines"])

    def compare():
        a = allocator
        while lines and lines[0][1:] == [a.allocated_bytes, a.max_allocated_bytes,
                                         a.reserved_bytes, a.max_reserved_bytes]:
            mark = lines.pop(0)[0]
            if mark == "data" or mark.endswith("zero_grad") and lines:
                a.reset_peak_stats()

    replay(document, allocator, compare)
    assert not lines
    theirs = document["rec"]["stats"]
    ours = allocator.stats()
    assert {key: ours[key] for key in theirs} == theirs


def test_a_cublas_handle_takes_addresses_once_a_thread():
    driver = Driver(GiB)
    context = driver.malloc(2 * MiB) + 2 * MiB - 416 * MiB  # the first small segment is the context's last
    driver.release_context_range()
    for thread, start in (("program", 64), ("program", 96), ("engine", 192)):
        driver.open_cublas(thread)
        assert driver.malloc(32 * MiB) == context + start * MiB
    assert driver.free_bytes == GiB - 98 * MiB


@pytest.mark.parametrize("name", NATIVE)
def test_the_address_model_gives_the_recorded_curves(name):
    document = recording(name)
    rec = document["rec"]
    real, _ = setup(document)
    model, events = setup(document, Driver(rec["total"], rec["free"]))
    live, theirs = {}, []
    for action, address, size, stream, frame in document["events"]:
        if action == "segment_alloc":
            theirs.append(address)
            if any("embedding" in str(line) for line in document["frames"][frame]):
                model.driver.release_context_range()
        elif action == "alloc":
            live[address] = real.malloc(size, stream), model.malloc(size, stream)
        elif action == "free_requested":
            for allocator, at in zip((real, model), live.pop(address), strict=True):
                allocator.free(at)
        assert (model.allocated_bytes, model.reserved_bytes) == (real.allocated_bytes, real.reserved_bytes)
    ours = [e[1] for e in events if e[0] == "segment_alloc"]
    pairs = [(i, j) for i in range(len(ours)) for j in range(i)]
    right = sum((ours[i] < ours[j]) == (theirs[i] < theirs[j]) for i, j in pairs)
    assert right / len(pairs) > 0.93


def test_the_second_reserved_range_starts_where_it_was_recorded():
    document = recording("base20exp")
    allocator, events = setup(document, Driver(document["rec"]["total"], document["rec"]["free"]))
    assert replay(document, allocator) == 0


# ---- rounding and segment sizes ----

@pytest.mark.parametrize("size, rounded", [
    (1, 512), (511, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512)])
def test_requests_round_up_to_512(size, rounded):
    assert round_size(size) == rounded


@pytest.mark.parametrize("divisions, size, rounded", [
    (4, 1200, 1536),  # not above 4 x 512: plain rounding
    (4, 5000, 5120), (4, 4096, 4096), (4, 4097, 5120), (8, 3 * MiB + 1, 3 * MiB + MiB // 4), (1, 5000, 5120),
    (2, 130 * MiB, 192 * MiB), (2, 200 * MiB, 256 * MiB)])
def test_power_of_2_divisions(divisions, size, rounded):
    assert round_size(size, (divisions,) * 16) == rounded
    allocator = CachingAllocator(Driver(GiB), settings=Settings(roundup_power2_divisions=(divisions,) * 16))
    assert allocator.block_bytes(allocator.malloc(size)) >= rounded


def test_power_of_2_divisions_by_interval():
    divisions = Settings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions
    assert divisions == (1,) * 9 + (2,) + (8,) * 6
    assert round_size(600 * MiB, divisions) == 768 * MiB
    assert round_size(300 * MiB + 1, divisions) == 300 * MiB + 512


@pytest.mark.parametrize("size, segment", [
    (512, 2 * MiB), (MiB, 2 * MiB), (MiB + 512, 20 * MiB), (10 * MiB - 512, 20 * MiB), (10 * MiB, 10 * MiB),
    (10 * MiB + 512, 12 * MiB), (393 * MiB, 394 * MiB)])
def test_segment_sizes(size, segment):
    assert segment_size(size) == segment
    allocator = CachingAllocator(Driver(GiB))
    allocator.malloc(size)
    assert allocator.reserved_bytes == segment
    assert allocator.segments()[0].kind == ("small" if size <= MiB else "large")


def test_nothing_asked_leaves_no_trace():
    events = []
    allocator = CachingAllocator(Driver(GiB), record=lambda *e: events.append(e))
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert events == [] and allocator.stats()["allocation.all.allocated"] == 0
    with pytest.raises(ValueError, match="-1 bytes"):
        allocator.malloc(-1)


def test_a_large_segment_size_replaces_20_mib():
    allocator = CachingAllocator(Driver(GiB), settings=Settings(large_segment_size_mb=64))
    allocator.malloc(2 * MiB)
    assert allocator.reserved_bytes == 64 * MiB


# ---- splitting and best fit ----

def test_a_large_block_is_split_only_if_more_than_1_mib_remains():
    for size, block in ((19 * MiB - 512, 19 * MiB - 512), (19 * MiB, 19 * MiB)):  # own segments of 20 and 20
        allocator = CachingAllocator(Driver(GiB))
        allocator.free(allocator.malloc(20 * MiB))
        assert allocator.block_bytes(allocator.malloc(size)) == (block if size < 19 * MiB else 20 * MiB)


def test_a_small_block_is_split_down_to_512():
    allocator = CachingAllocator(Driver(GiB))
    assert allocator.block_bytes(allocator.malloc(MiB - 512)) == MiB - 512
    assert allocator.block_bytes(allocator.malloc(MiB)) == MiB
    assert allocator.block_bytes(allocator.malloc(512)) == 512
    assert allocator.reserved_bytes == 2 * MiB


def test_the_request_gets_the_low_end():
    allocator = CachingAllocator(Driver(GiB))
    first, second = allocator.malloc(512), allocator.malloc(512)
    assert second == first + 512


def test_best_fit_then_lowest_address():
    allocator = CachingAllocator(ReplayDriver([900 * MiB, 100 * MiB, 500 * MiB], GiB))
    a, b, c = (allocator.malloc(size) for size in (12 * MiB, 12 * MiB, 14 * MiB))
    for address in (a, b, c):
        allocator.free(address)
    assert [allocator.malloc(12 * MiB) for _ in range(3)] == [100 * MiB, 900 * MiB, 500 * MiB]


def test_streams_do_not_share_free_blocks():
    allocator = CachingAllocator(Driver(GiB))
    allocator.free(allocator.malloc(30 * MiB, stream=7))
    allocator.malloc(30 * MiB, stream=0)
    assert allocator.reserved_bytes == 60 * MiB
    allocator.malloc(30 * MiB, stream=7)
    assert allocator.reserved_bytes == 60 * MiB


def test_freed_neighbours_merge_on_both_sides():
    allocator = CachingAllocator(Driver(GiB))
    a, b, c = (allocator.malloc(512 * 1024) for _ in range(3))
    for address in (a, c, b):
        allocator.free(address)
    assert [b[1:] for b in allocator.segments()[0].blocks] == [(2 * MiB, 512 * 1024, "inactive")]
    assert allocator.stats()["inactive_split.all.current"] == 0
    with pytest.raises(ValueError, match="no live block"):
        allocator.free(a)


# ---- options ----

def test_blocks_of_max_split_size_are_neither_split_nor_given_to_smaller_requests():
    allocator = CachingAllocator(Driver(4 * GiB), settings=Settings(max_split_size_mb=128))
    allocator.free(allocator.malloc(200 * MiB))
    allocator.malloc(50 * MiB)
    assert allocator.reserved_bytes == 250 * MiB  # 50 does not take the 200
    assert allocator.block_bytes(allocator.malloc(181 * MiB)) == 200 * MiB  # less than 20 MiB of slack: whole
    allocator.free(allocator.malloc(200 * MiB))
    allocator.malloc(180 * MiB)
    assert allocator.reserved_bytes == 630 * MiB  # 20 MiB of slack is too much


def test_max_split_size_releases_one_big_block_or_several_from_the_biggest_down():
    events = []
    allocator = CachingAllocator(Driver(500 * MiB), settings=Settings(max_split_size_mb=100),
                                 record=lambda action, *e: events.append((action, e[2] // MiB)))
    held = [allocator.malloc(size * MiB) for size in (120, 130, 150)]
    for address in held:
        allocator.free(address)
    allocator.malloc(250 * MiB)
    assert [e for e in events if e[0].startswith("segment")][3:] == [
        ("segment_free", 150), ("segment_free", 130), ("segment_alloc", 250)]
    assert allocator.stats()["num_alloc_retries"] == 0


def test_garbage_collection_frees_the_longest_idle_segments_above_the_threshold():
    settings = Settings(garbage_collection_threshold=0.5)
    allocator = CachingAllocator(Driver(GiB), settings=settings, limit_bytes=400 * MiB)
    allocator.free(allocator.malloc(2 * MiB, stream=9))
    old, young = allocator.malloc(100 * MiB), allocator.malloc(150 * MiB)
    allocator.free(old)
    for _ in range(5):
        allocator.free(allocator.malloc(2 * MiB, stream=9))
    allocator.free(young)
    allocator.malloc(200 * MiB)  # 270 reserved, 200 is the threshold: the old 100 goes, the others stay
    assert sorted(s.total_bytes // MiB for s in allocator.segments()) == [20, 150, 200]
    assert allocator.stats()["num_alloc_retries"] == 0


def test_garbage_collection_needs_a_limit():
    allocator = CachingAllocator(Driver(GiB), settings=Settings(garbage_collection_threshold=0.1))
    allocator.free(allocator.malloc(500 * MiB))
    allocator.malloc(501 * MiB)
    assert allocator.reserved_bytes == 1002 * MiB


@pytest.mark.parametrize("torch, limit", [("2.5.1", GiB), ("2.8.0", GiB), ("2.11.0+cu130", None), ("2.14.1", None)])
def test_a_fraction_of_1_is_a_limit_before_2_11(torch, limit):
    allocator = CachingAllocator(Driver(GiB), torch=torch)
    allocator.set_fraction(1.0)
    assert allocator.limit_bytes == limit
    allocator.set_fraction(0.3)
    assert allocator.limit_bytes == int(0.3 * GiB)
    with pytest.raises(ValueError, match="between 0 and 1"):
        allocator.set_fraction(1.5)


def test_the_limit_is_on_whole_segments():
    allocator = CachingAllocator(Driver(GiB), limit_bytes=21 * MiB)
    allocator.malloc(2 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(512)
    expandable = CachingAllocator(Driver(GiB), limit_bytes=39 * MiB, settings=EXPANDABLE)
    expandable.malloc(18 * MiB)
    with pytest.raises(OutOfMemory):
        expandable.malloc(20 * MiB)


def test_throw_on_cudamalloc_oom_does_not_release_first():
    for throws in (False, True):
        allocator = CachingAllocator(Driver(GiB), limit_bytes=100 * MiB, torch="2.14.1",
                                     settings=Settings(throw_on_cudamalloc_oom=throws))
        allocator.free(allocator.malloc(80 * MiB))
        if throws:
            with pytest.raises(OutOfMemory):
                allocator.malloc(90 * MiB)
        else:
            allocator.malloc(90 * MiB)


@pytest.mark.parametrize("text, torch, words", [
    ("max_split_mb:128", "2.11.0", "unknown allocator option 'max_split_mb'.*max_split_size_mb"),
    ("max_split_size_mb:20", "2.5.1", "above 20"), ("max_split_size_mb:19", "2.11.0", "at least 20"),
    ("max_split_size_mb:64,large_segment_size_mb:80", "2.11.0", "at least 80"),
    ("max_split_size_mb:1.5", "2.11.0", "whole number"),
    ("large_segment_size_mb:10", "2.11.0", "above 10"),
    ("large_segment_size_mb:64", "2.8.0", "since torch 2.11"),
    ("max_non_split_rounding_mb:8", "2.5.1", "since torch 2.6"),
    ("throw_on_cudamalloc_oom:True", "2.11.0", "since torch 2.12"),
    ("expandable_segments:yes", "2.11.0", "True or False"),
    ("garbage_collection_threshold:1.0", "2.11.0", "between 0 and 1"),
    ("roundup_power2_divisions:3", "2.11.0", "powers of 2"),
    ("roundup_power2_divisions:[300:2]", "2.11.0", "powers of 2"),
    ("backend:cudaMallocAsync", "2.11.0", "not modelled"),
    ("expandable_segments", "2.11.0", "option:value"), ("per_process_memory_fraction:2", "2.11.0", "between 0 and 1")])
def test_a_bad_option_is_one_clear_line(text, torch, words):
    with pytest.raises(ValueError, match=words) as error:
        Settings.parse(text, torch)
    assert "\n" not in str(error.value)


def test_options_are_read():
    text = " expandable_segments:True, max_split_size_mb:128,backend:native,pinned_num_register_threads:4"
    settings = Settings.parse(text, "2.11.0")
    assert settings == Settings(expandable_segments=True, max_split_size_mb=128)
    assert "grow without end" in settings.warnings[0]
    assert Settings.parse("max_split_size_mb:20", "2.11.0").max_split_bytes == 20 * MiB
    assert Settings.parse("", "2.5.1") == Settings() and Settings().warnings == ()
    assert CachingAllocator(Driver(GiB), settings=Settings(per_process_memory_fraction=0.5)).limit_bytes == GiB // 2


# ---- running out ----

def test_idle_segments_are_released_and_the_driver_asked_again():
    events = []
    allocator = CachingAllocator(Driver(100 * MiB), record=lambda action, *e: events.append(action))
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(80 * MiB)
    assert events == ["segment_alloc", "alloc", "free", "segment_free", "segment_alloc", "alloc"]
    stats = allocator.stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"], stats["num_sync_all_streams"]) == (1, 0, 1)
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (2, 1)


def test_out_of_memory_is_recorded_and_says_what_pytorch_says():
    events = []
    allocator = CachingAllocator(Driver(10 * GiB, 9 * GiB), limit_bytes=8 * GiB, record=lambda *e: events.append(e))
    allocator.malloc(6 * GiB)
    with pytest.raises(OutOfMemory) as raised:
        allocator.malloc(4 * GiB - 100)
    error = raised.value
    assert events[-1] == ("oom", 3 * GiB, 4 * GiB - 100, 4 * GiB, 0)
    assert (error.requested_bytes, error.segment_bytes, error.allocated_bytes) == (4 * GiB - 100, 4 * GiB, 6 * GiB)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 10.00 GiB of which 3.00 GiB is "
        "free. Including non-PyTorch memory, this process has 7.00 GiB memory in use. 8.00 GiB allowed; Of the "
        "allocated memory 6.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)")
    assert error.message(3).startswith("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 3 ")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_variable_in_the_message_follows_the_version():
    allocator = CachingAllocator(Driver(MiB), torch="2.5.1")
    with pytest.raises(OutOfMemory, match="setting PYTORCH_CUDA_ALLOC_CONF=expandable") as raised:
        allocator.malloc(1)
    assert "allowed" not in str(raised.value)


@pytest.mark.parametrize("size, words", [(0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"),
                                         (2 * MiB, "2.00 MiB"), (GiB, "1024.00 MiB"), (81_352_720_384, "75.77 GiB")])
def test_sizes_are_printed_as_pytorch_prints_them(size, words):
    assert format_size(size) == words


def test_more_than_an_exabyte_is_refused_at_once():
    allocator = CachingAllocator(Driver(GiB))
    with pytest.raises(OutOfMemory, match="more than 1EB memory"):
        allocator.malloc(2**60)
    assert allocator.stats()["num_ooms"] == 0


# ---- other streams ----

def test_a_block_that_another_stream_uses_returns_after_synchronize_at_the_next_malloc():
    events = []
    allocator = CachingAllocator(Driver(GiB), record=lambda action, *e: events.append(action))
    address = allocator.malloc(30 * MiB)
    allocator.record_stream(address, 0)  # its own stream does not count
    allocator.record_stream(address, 5)
    allocator.free(address)
    assert (allocator.allocated_bytes, allocator.stats()["active_bytes.all.current"]) == (0, 30 * MiB)
    assert allocator.segments()[0].blocks[0][3] == "active_pending_free"
    assert allocator.malloc(30 * MiB) != address
    allocator.synchronize()
    assert allocator.malloc(30 * MiB) == address
    assert events[2:] == ["free_requested", "segment_alloc", "alloc", "free_completed", "alloc"]
    assert allocator.stats()["active_bytes.all.peak"] == 60 * MiB


def test_waiting_for_a_stream_returns_what_only_that_stream_uses():
    allocator = CachingAllocator(Driver(GiB))
    one, both = allocator.malloc(30 * MiB), allocator.malloc(40 * MiB)
    for address, streams in ((one, (5,)), (both, (5, 6))):
        for stream in streams:
            allocator.record_stream(address, stream)
        allocator.free(address)
    allocator.synchronize(6)
    assert allocator.malloc(30 * MiB) != one
    allocator.synchronize(5)
    assert allocator.malloc(30 * MiB) == one and allocator.malloc(40 * MiB) != both


def test_memory_that_waits_is_waited_for_when_there_is_no_other():
    allocator = CachingAllocator(Driver(50 * MiB))
    address = allocator.malloc(30 * MiB)
    allocator.record_stream(address, 5)
    allocator.free(address)
    allocator.malloc(40 * MiB)
    assert allocator.stats()["num_alloc_retries"] == 1


def test_the_stream_of_the_allocation_itself_needs_no_waiting():
    allocator = CachingAllocator(Driver(GiB))
    address = allocator.malloc(30 * MiB, stream=4)
    allocator.record_stream(address, 4)
    allocator.free(address)
    assert allocator.malloc(30 * MiB, stream=4) == address
    with pytest.raises(ValueError, match="no live block"):
        allocator.record_stream(1, 4)


def test_what_waits_counts_as_active_and_as_requested():
    allocator = CachingAllocator(Driver(GiB))
    address = allocator.malloc(30 * MiB - 4)
    allocator.record_stream(address, 5)
    allocator.free(address)
    allocator.malloc(20 * MiB)

    def read(*names):
        stats = allocator.stats()
        return [stats[name] for name in names]

    assert read("active.all.peak", "active.all.freed", "allocation.all.peak", "allocation.all.freed") == [2, 0, 1, 1]
    assert read("active_bytes.all.peak", "requested_bytes.all.peak") == [50 * MiB, 50 * MiB - 4]
    allocator.reset_accumulated_stats()
    allocator.empty_cache()
    assert read("active.all.freed", "allocation.all.freed", "requested_bytes.all.freed") == [1, 0, 30 * MiB - 4]
    assert read("active.all.current", "active.all.peak", "active.all.allocated") == [1, 2, 0]


# ---- expandable segments ----

def test_missing_pages_are_mapped_behind_the_free_tail():
    events = []
    allocator = CachingAllocator(Driver(GiB), settings=EXPANDABLE, record=lambda *e: events.append(e))
    first = allocator.malloc(8_519_680)
    assert allocator.reserved_bytes == 20 * MiB
    assert allocator.malloc(30 * MiB) == first + 8_519_680  # 12,451,840 B of tail and one more page
    assert allocator.reserved_bytes == 40 * MiB
    assert [e[:4] for e in events if e[0] == "segment_map"] == [
        ("segment_map", first, 20 * MiB, 20 * MiB), ("segment_map", first + 20 * MiB, 20 * MiB, 20 * MiB)]
    assert allocator.stats()["segment.all.current"] == 0
    assert allocator.stats()["inactive_split.all.current"] == 0


def test_small_pages_are_2_mib_and_pools_have_ranges_of_their_own():
    allocator = CachingAllocator(Driver(GiB), settings=EXPANDABLE)
    small, large = allocator.malloc(512), allocator.malloc(2 * MiB)
    assert allocator.reserved_bytes == 22 * MiB and abs(large - small) >= GiB
    assert allocator.block_bytes(allocator.malloc(18 * MiB - 512)) == 18 * MiB - 512  # split down to 512 B


def test_the_block_at_the_frontier_is_used_last():
    allocator = CachingAllocator(Driver(GiB), settings=EXPANDABLE)
    hole, _, tail = allocator.malloc(6 * MiB), allocator.malloc(2 * MiB), allocator.malloc(2 * MiB)
    allocator.malloc(5 * MiB)  # leaves 5 MiB before the frontier: a tighter fit than the hole
    allocator.free(hole)
    assert allocator.malloc(4 * MiB) == hole
    assert tail > hole


def test_max_split_size_does_not_stop_splitting_in_an_expandable_segment():
    allocator = CachingAllocator(Driver(GiB), settings=Settings(expandable_segments=True, max_split_size_mb=30))
    assert allocator.block_bytes(allocator.malloc(31 * MiB)) == 31 * MiB
    assert allocator.reserved_bytes == 40 * MiB


def test_empty_cache_unmaps_whole_pages_and_keeps_the_edges():
    allocator = CachingAllocator(Driver(GiB), settings=EXPANDABLE)
    a, b, c = allocator.malloc(10 * MiB), allocator.malloc(60 * MiB), allocator.malloc(10 * MiB)
    allocator.free(b)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MiB  # 10..70: the pages 20..60 go
    assert [(s.total_bytes // MiB, len(s.blocks)) for s in allocator.segments()] == [(20, 2), (20, 2)]
    assert allocator.malloc(60 * MiB) == b and allocator.reserved_bytes == 80 * MiB  # the lowest place with room
    for address in (a, b, c):
        allocator.free(address)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0 and allocator.segments() == []
    assert allocator.driver.free_bytes == GiB


def test_a_failed_map_gives_its_own_pages_back():
    allocator = CachingAllocator(Driver(50 * MiB), settings=EXPANDABLE)
    allocator.malloc(10 * MiB)
    with pytest.raises(OutOfMemory) as raised:
        allocator.malloc(60 * MiB)
    assert raised.value.segment_bytes == 60 * MiB and allocator.reserved_bytes == 20 * MiB


# ---- what people asked ----

def resnet18_bytes():
    """Bytes of resnet18's 122 tensors in fp32, parameters then buffers of each leaf, in the order of .cuda()."""
    def norm(c):
        return [4 * c, 4 * c, 4 * c, 4 * c, 4]

    def conv(i, o, k):
        return [4 * i * o * k * k]

    sizes, width = conv(3, 64, 7) + norm(64), 64
    for out in (64, 128, 256, 512):
        for block in range(2):
            i = width if block == 0 else out
            sizes += conv(i, out, 3) + norm(out) + conv(out, out, 3) + norm(out)
            if block == 0 and width != out:
                sizes += conv(width, out, 1) + norm(out)
        width = out
    return sizes + [4 * 512 * 1000, 4 * 1000]


def test_case_1_resnet18_takes_more_than_its_tensors():
    sizes = resnet18_bytes()
    assert (len(sizes), sum(sizes)) == (122, 46_796_528)
    allocator = CachingAllocator(Driver(GiB))
    for size in sizes:
        allocator.malloc(size)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (46_861_312, 64 * MiB)


def test_case_7_small_blocks_in_a_big_segment_force_a_second_one():
    def run(settings):
        allocator = CachingAllocator(Driver(40 * GiB), settings=settings)
        allocator.free(allocator.malloc(11 * GiB))
        pieces = [allocator.malloc(11 * GiB // 88) for _ in range(88)]
        for i, address in enumerate(pieces):
            if i % 22:
                allocator.free(address)
        largest, idle = allocator.largest_free_block_bytes(), allocator.reserved_bytes - allocator.allocated_bytes
        assert largest < idle / 3
        allocator.malloc(11 * GiB)
        return allocator.reserved_bytes

    assert run(Settings()) == 22 * GiB
    assert run(EXPANDABLE) < 20 * GiB


def test_case_8_max_split_size_and_expandable_segments_together_grow_without_end():
    def run(settings, rounds):
        allocator = CachingAllocator(Driver(80 * GiB), settings=settings)
        for _ in range(rounds):
            big = allocator.malloc(91 * MiB), allocator.malloc(91 * MiB // 2)
            allocator.malloc(2 * MiB)
            for address in big:
                allocator.free(address)
        return allocator.reserved_bytes

    both = Settings(expandable_segments=True, max_split_size_mb=128)
    assert run(both, 20) > 2 * GiB and run(both, 40) > 2 * run(both, 20) - 300 * MiB
    for alone in (EXPANDABLE, Settings(max_split_size_mb=128)):
        assert run(alone, 40) < 500 * MiB
    assert both.warnings


@pytest.mark.parametrize("order, more", [((512, 640, 768, 1024), True), ((1024, 768, 640, 512), False)])
def test_case_9_growing_lengths_leave_more_reserved(order, more):
    def step(allocator, length):
        held = [allocator.malloc(8 * length * 768 * 4 * k) for k in (1, 3, 1, 4, 4, 1) * 12]
        for address in held:
            allocator.free(address)

    allocator = CachingAllocator(Driver(80 * GiB))
    for length in order:
        step(allocator, length)
    longest = CachingAllocator(Driver(80 * GiB))
    step(longest, 1024)
    assert (allocator.reserved_bytes > longest.reserved_bytes) == more
    assert allocator.allocated_bytes == 0


@pytest.mark.parametrize("size, words", [(4, "2.00 MiB"), (MiB, "2.00 MiB"), (9 * MiB, "20.00 MiB")])
def test_case_30_the_message_prints_the_segment(size, words):
    with pytest.raises(OutOfMemory, match=f"Tried to allocate {words}"):
        CachingAllocator(Driver(MiB)).malloc(size)


# ---- at random ----

def check(allocator, capacity):
    segments = allocator.segments()
    assert allocator.requested_bytes <= allocator.stats()["active_bytes.all.current"]
    assert allocator.allocated_bytes <= allocator.reserved_bytes <= capacity
    assert sum(s.total_bytes for s in segments) == allocator.reserved_bytes == capacity - allocator.driver.free_bytes
    end = 0
    for segment in segments:
        assert segment.address >= end
        end = segment.address
        for address, size, _, _ in segment.blocks:
            assert address == end
            end += size
        assert end == segment.address + segment.total_bytes


@pytest.mark.parametrize("settings", [
    Settings(), EXPANDABLE, Settings(max_split_size_mb=64), Settings(roundup_power2_divisions=(4,) * 16),
    Settings(garbage_collection_threshold=0.6)], ids=["native", "expandable", "max split", "power of 2", "collecting"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_blocks_tile_segments_and_nothing_is_lost(settings, seed):
    chance, capacity = random.Random(seed), GiB
    allocator = CachingAllocator(Driver(capacity), settings=settings, limit_bytes=capacity - seed * 100 * MiB)
    live, failed = [], 0
    for i in range(600):
        if live and chance.random() < 0.4:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            try:
                size = int(2 ** chance.uniform(1, 28.5))
                live.append(allocator.malloc(size, stream=chance.choice((0, 0, 0, 9))))
                assert allocator.block_bytes(live[-1]) >= size
            except OutOfMemory:
                failed += 1
        if live and chance.random() < 0.05:
            allocator.record_stream(chance.choice(live), 3)
        if chance.random() < 0.02:
            chance.choice((allocator.empty_cache, allocator.synchronize))()
        if i % 25 == 0:
            check(allocator, capacity)
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    check(allocator, capacity)
    assert failed and allocator.reserved_bytes == allocator.allocated_bytes == allocator.requested_bytes == 0
    stats = allocator.stats()
    for name in ("allocation", "active", "inactive_split", "reserved_bytes", "active_bytes", "segment"):
        for pool in ("all", "small_pool", "large_pool"):
            assert stats[f"{name}.{pool}.current"] == 0
            assert stats[f"{name}.{pool}.allocated"] == stats[f"{name}.{pool}.freed"]


def test_peaks_are_the_highest_there_was_between_two_readings():
    allocator = CachingAllocator(Driver(GiB))
    held = [allocator.malloc(size * MiB) for size in (30, 50, 2)]
    for address in held:
        allocator.free(address)
    stats = allocator.stats()
    assert (stats["allocated_bytes.all.peak"], stats["allocation.large_pool.peak"]) == (82 * MiB, 3)
    assert (stats["inactive_split.all.peak"], stats["inactive_split_bytes.all.peak"]) == (1, 18 * MiB)


def test_statistics_start_again_when_told():
    allocator = CachingAllocator(Driver(GiB))
    a, b = allocator.malloc(30 * MiB), allocator.malloc(50 * MiB)
    allocator.free(b)
    allocator.reset_peak_stats()
    allocator.reset_accumulated_stats()
    stats = allocator.stats()
    assert (stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.allocated"]) == (30 * MiB, 0)
    allocator.free(a)
    stats = allocator.stats()
    assert (stats["allocated_bytes.all.freed"], stats["active.large_pool.freed"]) == (30 * MiB, 1)
    assert stats["max_split_size"] == -1


# ---- the driver ----

def test_segments_fill_what_is_left_of_the_newest_range():
    driver = Driver(GiB)
    first, second, third = driver.malloc(20 * MiB), driver.malloc(20 * MiB), driver.malloc(12 * MiB)
    assert second == first - 32 * MiB and third == second + 20 * MiB
    assert driver.malloc(12 * MiB) == first + 20 * MiB


def test_a_range_that_is_free_again_is_reserved_again():
    driver = Driver(GiB)
    first, second = driver.malloc(64 * MiB), driver.malloc(64 * MiB)
    driver.free(first)
    assert driver.free_bytes == GiB - 64 * MiB
    assert driver.malloc(96 * MiB) < second
    assert driver.malloc(50 * MiB) == first


def test_the_driver_gives_whole_pages_until_memory_is_out():
    driver = Driver(10 * MiB, 5 * MiB)
    assert driver.malloc(3 * MiB) and driver.free_bytes == MiB
    assert driver.malloc(1) is None and not driver.map(2 * MiB)
    with pytest.raises(ValueError, match="free memory at start"):
        Driver(MiB, 2 * MiB)


# ---- speed ----

def test_it_is_fast_enough_to_simulate_a_training_step_in_no_time():
    document = recording("base8")
    operations = [(e[0] == "alloc", e[1], e[2]) for e in document["events"] if e[0] in ("alloc", "free_requested")]

    def seconds():
        allocator, live = CachingAllocator(Driver(document["rec"]["total"])), {}
        start = time.perf_counter()
        for is_alloc, address, size in operations:
            if is_alloc:
                live[address] = allocator.malloc(size)
            else:
                allocator.free(live[address])
        return time.perf_counter() - start

    assert len(operations) / min(seconds() for _ in range(5)) > 100_000  # measured: above 500,000 events a second
