"""The recordings in tests/traces as the snapshots that `_dump_snapshot` would have written. For tests."""

import gzip
import json
from pathlib import Path

NAMES = ("base8", "base20exp", "bf16", "sdpabf16", "ckpt")


def load(name: str) -> dict:
    return json.loads(gzip.decompress((Path(__file__).parent / "traces" / f"{name}.json.gz").read_bytes()))


def snapshot(recording: dict, keep: int | None = None, late: bool = False) -> dict:
    """The whole history, or its last `keep` entries, as a ring that wrapped leaves them.

    Blocks that are alive at the end carry the stack of their birth; `late`: only if it is among the entries kept,
    as when the recording began late.
    """
    frames = [[_frame(text) for text in stack] for stack in recording["frames"]]
    entries = [{"action": action, "addr": address, "size": size, "stream": stream, "time_us": i, "frames": frames[k]}
               for i, (action, address, size, stream, k) in enumerate(recording["events"])]
    kept = entries if keep is None else entries[-keep:]
    born = {e["addr"]: e["frames"] for e in (kept if late else entries) if e["action"] == "alloc"}
    expandable = recording["events"][0][0] == "segment_map"
    return {"segments": [_segment(s, expandable, born) for s in recording["segments"]], "device_traces": [kept],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1}, "external_annotations": []}


def _frame(text: str) -> dict:
    file, line, name = text.split(":", 2)
    return {"filename": file, "line": int(line), "name": name}


def _segment(recorded: dict, expandable: bool, born: dict) -> dict:
    address, blocks = recorded["address"], []
    for size, requested, state in recorded["blocks"]:
        frames = born.get(address, []) if state == "active_allocated" else []
        blocks.append({"address": address, "size": size, "requested_size": requested, "state": state,
                       "frames": list(frames)})
        address += size
    return {"device": 0, "address": recorded["address"], "total_size": recorded["total"], "stream": recorded["stream"],
            "allocated_size": recorded["alloc"], "active_size": recorded["active"], "requested_size": 0,
            "segment_type": recorded["type"], "segment_pool_id": (0, 0), "is_expandable": expandable, "frames": [],
            "blocks": blocks}
