"""Where the study keeps its things, and how it writes them: a file is the old one or the new one, never half of each.

Everything written goes under the checkout, or under the folder named by `STUDY_OUT`. Tables that this machine
cannot make again (published, measured) are read from the checkout when `STUDY_OUT` does not have them.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("published", "measured", "predicted")


def out() -> Path:
    """The folder that receives everything the study writes: `$STUDY_OUT`, or the checkout."""
    chosen = os.environ.get("STUDY_OUT")
    return Path(chosen).expanduser().absolute() if chosen else ROOT


def results() -> Path:
    """The folder of the tables."""
    return out() / "results"


def figures() -> Path:
    """The folder of the pictures."""
    return out() / "figures"


def notebooks() -> Path:
    """The folder of the executed notebooks (their sources are always those of the checkout)."""
    return out() / "notebooks"


def state() -> Path:
    """The ignored folder of what a run needs for itself: lock, stamps, settings of Jupyter and matplotlib."""
    return out() / "build" / "study"


def gpu_folder(gpu: str) -> str:
    """The name of a GPU as a folder: `NVIDIA H200` is `NVIDIA-H200`."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")


def results_of(kind: str, gpu: str | None = None) -> Path:
    """The folder of the results of one kind, on one GPU if one is named."""
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    return results() / kind / gpu_folder(gpu) if gpu else results() / kind


def recorded_gpus(kind: str = "measured") -> list[str]:
    """The folder names of the GPUs that results of this kind exist for, here or in the checkout."""
    entries = [*results_of(kind).glob("*"), *(ROOT / "results" / kind).glob("*")]
    return sorted({entry.name for entry in entries if entry.is_dir()})


def find(path: str | os.PathLike) -> Path:
    """The file to read for `path`, absolute or relative to results/; FileNotFoundError if there is none.

    Published and measured results fall back to the checkout. Predicted ones do not: under `STUDY_OUT` they are
    made anew.
    """
    wanted = results() / path
    places = [wanted]
    if wanted.is_relative_to(results()):
        inside = wanted.relative_to(results())
        if inside.parts[0] in ("published", "measured"):
            places.append(ROOT / "results" / inside)
    for place in places:
        if place.is_file():
            note("read", place)
            return place
    raise FileNotFoundError(f"no {shorten(wanted)} (`make reproduce` predicts, `make measure` measures)")


def shorten(path: str | os.PathLike) -> str:
    """A path as people read it: relative to the output folder or the checkout when it lies inside."""
    for base in (out(), ROOT):
        if Path(path).is_relative_to(base):
            return str(Path(path).relative_to(base))
    return str(path)


def write(path: str | os.PathLike, data: bytes) -> bool:
    """Make `data` the content of `path`, at once or not at all; True if the file changed.

    A file that already holds these bytes is left alone. The bytes go to a temporary file beside the target, which takes
    the target's name only after they are on the disk; `sweep` removes what a killed writer left.
    """
    path = Path(path)
    note("wrote", path)
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return True


def sweep(folder: Path) -> None:
    """Remove the drafts under `folder` whose writers are dead."""
    for draft in folder.rglob(".*.tmp"):
        pid = draft.name.split(".")[-2]
        if pid.isdigit() and not is_alive(int(pid)):
            draft.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def note(action: str, path: Path) -> None:
    """Tell the runner of notebooks which file was read or wrote: it redoes a notebook when one of them changes."""
    journal = os.environ.get("STUDY_JOURNAL")
    if journal:
        with open(journal, "a", encoding="utf-8") as file:
            file.write(f"{action} {path.absolute()}\n")
