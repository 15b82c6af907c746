"""What if: recorded runs through the allocator again, on other cards, with other settings, with an earlier `del`."""

from pathlib import Path

import pytest

from gpt2.memory.gpus import find, with_memory
from gpt2.memory.replay import CONFIGURATIONS, best_settings, edited, replay, saving
from gpt2.memory.snapshot import to_trace
from gpt2.memory.trace import Event, Mark, Trace
from gpt2.memory.viewer import to_snapshot
from tests import recordings

MiB = 2**20
H200 = Path(__file__).parent.parent / "results" / "measured" / "h200" / "traces"
EXPANDABLE = "expandable_segments:True"


def measured(name: str) -> Trace:
    return Trace.load(H200 / f"{name}.json.gz")


@pytest.mark.parametrize("name", recordings.NAMES)
def test_a_snapshot_replayed_with_its_own_settings_is_what_was_recorded(name):
    recording = recordings.load(name)
    trace = to_trace(recordings.snapshot(recording))
    conf = EXPANDABLE if name == "base20exp" else ""
    result = replay(trace, gpu="H200", limit_bytes=recording["rec"]["cap_mib"] * MiB or None, allocator_conf=conf)
    stats = recording["rec"]["stats"]
    assert result.fits and result.known_to_the_end and result.notes == ()
    assert result.peak_allocated_bytes == stats["allocated_bytes.all.peak"]
    assert result.peak_reserved_bytes == stats["reserved_bytes.all.peak"]
    moves = [(e.action, e.requested_bytes) for e in trace.events if "segment" not in e.action]
    assert [(e.action, e.requested_bytes) for e in result.trace.events if "segment" not in e.action] == moves
    assert [e.category for e in result.trace.events if e.action == "alloc"] == [
        e.category for e in trace.events if e.action == "alloc"]


@pytest.mark.parametrize("name", ["sweep-20", "sweep-22-expandable", "checkpoint", "batch-1"])
def test_a_recording_of_the_study_comes_out_to_the_byte_with_its_marks(name):
    trace = measured(name)
    result = replay(trace, allocator_conf=trace.meta["allocator_conf"])
    assert result.fits
    assert result.peak_allocated_bytes == trace.meta["max_allocated_bytes"]
    assert result.peak_reserved_bytes == max(trace.reserved_bytes())
    assert [(m.name, m.allocated_bytes, m.reserved_bytes) for m in result.trace.marks] == [
        (m.name, m.allocated_bytes, m.reserved_bytes) for m in trace.marks]


@pytest.mark.parametrize("batch", [21, 22])
def test_a_batch_that_ran_out_fits_with_expandable_segments_as_its_recording_shows(batch):
    trace, other = measured(f"sweep-{batch}"), measured(f"sweep-{batch}-expandable")
    native = replay(trace)
    assert not native.fits and trace.events[native.failed_at].action == "oom"
    assert native.message.startswith(trace.meta["out_of_memory"]["message"].split(". GPU")[0])
    result = replay(trace, allocator_conf=EXPANDABLE)
    assert result.fits and not result.known_to_the_end and "ran out of memory" in result.notes[0]
    assert result.peak_allocated_bytes == other.meta["max_allocated_bytes"]
    assert result.peak_reserved_bytes == max(other.reserved_bytes())
    best = best_settings(trace)
    assert best[0]["allocator_conf"] == EXPANDABLE and best[0]["fits"]
    assert {row["allocator_conf"] for row in best} == set(CONFIGURATIONS)
    assert [row["fits"] for row in best] == sorted((row["fits"] for row in best), reverse=True)
    plain = next(row for row in best if not row["allocator_conf"])
    assert plain["saved_bytes"] == 0 and plain["failed_at"] == native.failed_at


def test_where_expandable_segments_run_natively_they_run_out():
    trace = measured("sweep-22-expandable")
    result = replay(trace, allocator_conf="")
    assert not result.fits and "Tried to allocate 4.22 GiB" in result.message
    assert trace.events[result.failed_at].step == 2 and trace.events[result.failed_at].phase == "backward"


def test_another_card_by_name_by_profile_and_by_bytes():
    trace = measured("sweep-8")
    roomy = replay(trace, capacity_bytes=2**40)
    peak, least = roomy.peak_reserved_bytes, roomy.peak_allocated_bytes
    assert replay(trace, gpu="A40").fits and not replay(trace, gpu="t4").fits
    small = with_memory(find("H200"), peak + find("H200").context_bytes)
    assert replay(trace, gpu=small).fits
    assert replay(trace, capacity_bytes=peak).fits and not replay(trace, capacity_bytes=least).fits
    assert replay(trace, gpu="A40", limit_bytes=peak).fits and not replay(trace, gpu="A40", limit_bytes=least).fits
    assert replay(trace, gpu="A40").trace.meta["gpu"] == "A40"


@pytest.mark.parametrize("wrong", [
    dict(gpu="A4000"), dict(allocator_conf="expandable:True"), dict(capacity_bytes=0), dict(limit_bytes=-1),
    dict(allocator_conf="large_segment_size_mb:40", torch="2.5.1")])
def test_what_does_not_exist_is_refused(wrong):
    trace = Trace([Event("alloc", 0, 512, 512)])
    with pytest.raises(ValueError):
        replay(trace, **wrong)
    with pytest.raises(ValueError):
        best_settings(trace, gpu="A4000")
    with pytest.raises(ValueError, match="nothing to replay"):
        replay(Trace())


def test_a_bad_combination_of_settings_is_warned_of():
    result = replay(measured("batch-1"), allocator_conf=f"max_split_size_mb:128,{EXPANDABLE}")
    assert any("grow without end" in note for note in result.notes)


def three_blocks() -> Trace:
    """a and b are live together, then c takes as much as both."""
    def event(action, address, size):
        return Event(action, address, size, size, phase="forward", step=1)
    a, b, c = (20 * MiB * n for n in (1, 2, 3))
    return Trace([event("alloc", 0, a), event("alloc", a, b), event("free", a, b), event("alloc", a + b, c),
                  event("free", 0, a), event("free", a + b, c)], [Mark("end", 6, 1, 0, 0, 0, 0)])


def test_an_earlier_free_lowers_the_peak_by_what_it_frees():
    trace = three_blocks()
    assert replay(trace).peak_allocated_bytes == 80 * MiB
    earlier = edited(trace, {0: 1})
    assert [e.action for e in earlier.events] == ["alloc", "alloc", "free", "free", "alloc", "free"]
    assert earlier.events[2].address == 0 and max(earlier.allocated_bytes()) == 60 * MiB
    assert earlier.marks[0].event_count == 6
    assert saving(trace, {0: 1})["saved_allocated_bytes"] == 20 * MiB
    assert saving(trace, {0: 3})["saved_allocated_bytes"] == 0  # after the peak: too late
    assert saving(trace, {0: 1, 1: 1})["peak_allocated_bytes"] == 60 * MiB


@pytest.mark.parametrize("wrong", [{0: 4}, {0: -1}, {3: 0}, {2: 2}, {-1: 1}])
def test_a_block_can_be_freed_earlier_only_while_it_lives(wrong):
    with pytest.raises(ValueError, match="block"):
        edited(three_blocks(), wrong)


def test_a_free_that_waits_for_another_stream_is_replayed_and_can_be_moved():
    events = [Event("alloc", 0, 20 * MiB, 20 * MiB), Event("free_requested", 0, 20 * MiB, 20 * MiB),
              Event("alloc", 20 * MiB, 20 * MiB, 20 * MiB), Event("free_completed", 0, 20 * MiB, 20 * MiB),
              Event("alloc", 0, 20 * MiB, 20 * MiB)]
    result = replay(Trace(events))
    assert [e.action for e in result.trace.events if "segment" not in e.action] == [e.action for e in events]
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (40 * MiB, 40 * MiB)
    moved = edited(Trace(events), {0: 0})
    assert [e.action for e in moved.events] == ["alloc", "free", "alloc", "alloc"]


def test_dropping_logits_after_the_loss_saves_nothing_at_the_peak_of_the_article():
    """The logits are saved for backward while the peak lasts: `del` before the optimizer moves no peak."""
    trace = measured("base")
    logits = 8 * 1024 * 50_257 * 4
    blocks = trace.blocks()
    n, held = max(((n, b) for n, b in enumerate(blocks) if b.event.requested_bytes == logits and b.event.step == 2
                   and b.event.phase == "forward"), key=lambda pair: (pair[1].died or len(trace)) - pair[1].born)
    last = max(i for i, e in enumerate(trace.events[:held.died]) if e.phase == "backward" and e.step == 2)
    assert saving(trace, {n: last})["saved_allocated_bytes"] == 0


def test_memory_given_back_on_purpose_is_given_back_again():
    """empty_cache() shows as segments freed without need; in a retry a new segment follows."""
    size = 40 * MiB
    def event(action, address):
        return Event(action, address, size, size)
    emptied = [event("segment_alloc", 0), event("alloc", 0), event("free", 0), event("segment_free", 0),
               Event("alloc", size, 2 * MiB, 2 * MiB)]
    actions = [e.action for e in replay(Trace(emptied)).trace.events]
    assert actions == ["segment_alloc", "alloc", "free", "segment_free", "segment_alloc", "alloc"]
    retried = emptied[:4] + [event("segment_alloc", size), event("alloc", size)]
    assert "segment_free" not in [e.action for e in replay(Trace(retried)).trace.events]


def test_a_replayed_trace_can_be_written_and_read():
    result = replay(measured("batch-1"), allocator_conf=EXPANDABLE)
    again = to_trace(to_snapshot(result.trace))
    assert max(again.allocated_bytes()) == result.peak_allocated_bytes
    assert max(again.reserved_bytes()) == result.peak_reserved_bytes
    assert again.meta["warnings"] == []


def test_a_history_that_began_late_is_replayed_with_a_note():
    recording = recordings.load("base8")
    trace = to_trace(recordings.snapshot(recording, 3000))
    result = replay(trace, gpu="H200")
    assert result.fits and "older than the recording" in result.notes[0]
    assert result.peak_allocated_bytes == pytest.approx(recording["rec"]["stats"]["allocated_bytes.all.peak"], rel=0.01)
