"""Run the notebooks, clean them, save them: `python -m gpt2.study.notebooks run [names] [-p key value] [--fast]`.

One after another; each is saved when it has run to its end, or not at all. A notebook whose source, package, inputs,
parameters and outputs are those of its last run is skipped, so a killed run goes on where it stopped. A run with other
parameters than the committed ones writes to $STUDY_OUT, or build/other, and leaves the committed study alone.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import nbformat

from gpt2.study import paths
from gpt2.study.jupyter import clean, lab, parameters

SOURCES = paths.ROOT / "notebooks"


@dataclass(frozen=True)
class Job:
    """One notebook to run, with the parameters that differ from its own."""

    source: Path
    given: dict

    @property
    def name(self) -> str:
        """Such as `03-peak`."""
        return self.source.stem

    @property
    def target(self) -> Path:
        """The file that receives the executed notebook."""
        return paths.notebooks() / self.source.name


class Failed(Exception):
    """A notebook that did not run to its end, or could not be saved; the message is one line."""


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit status: 0 done, 1 some notebook failed, 2 bad input."""
    options = _options(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        jobs = plan(options.names, options.parameters, fast=options.fast)
    except parameters.BadParameter as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if any(job.given for job in jobs) and "STUDY_OUT" not in os.environ:
        os.environ["STUDY_OUT"] = str(paths.ROOT / "build" / "other")
        print("other parameters than the committed ones: writing to build/other")
    try:
        with alone():
            return run_all(jobs, force=options.force)
    except OSError as error:
        print(f"error: cannot work in {paths.state()}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, and the next run goes on from there", file=sys.stderr)
        return 130


def plan(names: list[str], given: list[tuple[str, str]], *, fast: bool = False) -> list[Job]:
    """The notebooks to run, all checked before any runs.

    Args:
        names: `03`, `03-peak` or a path; all notebooks if empty.
        given: parameters as (name, text); each goes to the notebooks that have it, and one at least must.
        fast: set `fast = True` in the notebooks that have this parameter.
    """
    sources = [_source(name) for name in names] or sorted(SOURCES.glob("*.ipynb"))
    jobs, unknown = [], dict(given)
    for source in sources:
        try:
            notebook = nbformat.read(source, as_version=4)
            known = parameters.declared(notebook)
            values = {name: parameters.checked(name, text, notebook) for name, text in given if name in known}
        except (parameters.BadParameter, nbformat.reader.NotJSONError) as error:
            raise parameters.BadParameter(f"{source.stem}: {error}") from error
        if fast and "fast" in known:
            values.setdefault("fast", True)
        unknown = {name: text for name, text in unknown.items() if name not in known}
        jobs.append(Job(source, {name: value for name, value in values.items() if value != known[name]}))
    if unknown:
        raise parameters.BadParameter(f"no notebook here has the parameter {', '.join(unknown)}")
    return jobs


def run_all(jobs: list[Job], *, force: bool = False) -> int:
    """Run the jobs, a line each; a failing one does not stop the others. Returns 1 if any failed, else 0."""
    os.environ.update(lab.prepare(paths.state()))
    for folder in (paths.results(), paths.figures(), paths.notebooks()):
        paths.sweep(folder)
    failed = []
    for job in jobs:
        print(f"{job.name:<24}", end="", flush=True)
        start = time.perf_counter()
        try:
            ran, warnings = run(job, force=force)
        except Failed as error:
            print(f"FAILED   {error}", flush=True)
            failed.append(job.name)
            continue
        print(f"{time.perf_counter() - start:6.1f} s" if ran else "up to date", flush=True)
        for warning in warnings:
            print(f"    not kept in the notebook: {warning}", flush=True)
    count = len(jobs) or "no"
    print(f"{count} notebooks" + (f", failed: {', '.join(failed)}" if failed else ", all well"))
    return 1 if failed else 0


def run(job: Job, *, force: bool = False) -> tuple[bool, list[str]]:
    """Run one notebook and save it. Returns whether it had to run, and the warnings it gave.

    Raises:
        Failed: with the cell's number and first line. The saved notebook is then the old one.
    """
    stamp = paths.state() / "stamps" / f"{job.name}.json"
    journal = paths.state() / f"{job.name}.journal"
    before = fingerprint(job)
    if not force and _is_current(stamp, before):
        return False, []
    try:
        stamp.unlink(missing_ok=True)
        journal.unlink(missing_ok=True)
        os.environ |= {"STUDY_JOURNAL": str(journal), "STUDY_COMMAND": f"notebook {job.name}"}
        notebook = execute(job)
        warnings = clean.clean(notebook)
        paths.write(job.target, clean.dumps(notebook))
    except clean.NothingToSee as error:
        raise Failed(str(error)) from error
    except OSError as error:
        raise Failed(f"cannot save {paths.shorten(job.target)}: {error.strerror or error}") from error
    finally:
        os.environ.pop("STUDY_JOURNAL", None)
    _write_stamp(stamp, before, [job.target, *_journal(journal)])
    return True, warnings


def execute(job: Job) -> nbformat.NotebookNode:
    """The notebook after a clean run from top to bottom in a new kernel; Failed if it does not reach the end."""
    import papermill  # slow, and not needed when everything is up to date
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    folder = paths.state() / "running"
    folder.mkdir(parents=True, exist_ok=True)
    source, draft = folder / f"{job.name}.source.ipynb", folder / f"{job.name}.ipynb"
    source.write_bytes(clean.dumps(clean.strip(nbformat.read(job.source, as_version=4))))
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    try:
        papermill.execute_notebook(
            source,
            draft,
            job.given,
            kernel_name="python3",
            language="python",
            progress_bar=False,
            cwd=SOURCES,
            config=lab.CONFIG,
        )
    except PapermillExecutionError as error:
        raise Failed(f"{_cell(error.source, error.exec_count)}: {error.ename}: {_first_line(error.evalue)}") from error
    except DeadKernelError as error:
        raise Failed(f"{_last_cell(draft)}: the kernel died (killed, or out of memory)") from error
    except Exception as error:  # whatever it is, the other notebooks still get their turn
        draft.with_suffix(".error.txt").write_text(traceback.format_exc())
        raise Failed(f"{_last_cell(draft)}: {_first_line(str(error)) or type(error).__name__}") from error
    notebook = nbformat.read(draft, as_version=4)
    draft.unlink()
    source.unlink()
    return notebook


def fingerprint(job: Job) -> str:
    """A hash of everything a run depends on: source, parameters, package, inputs, versions."""
    notebook = nbformat.read(job.source, as_version=4)
    text = [[cell.cell_type, cell.source] for cell in clean.strip(notebook).cells]
    versions = [sys.version, *(version(name) for name in ("torch", "numpy", "pandas", "matplotlib", "ipywidgets"))]
    known = json.dumps([text, notebook.metadata, job.given, versions], sort_keys=True, default=str)
    digest = hashlib.sha256(known.encode())
    for path in _inputs():
        digest.update(f"{paths.shorten(path)} {_sha(path)}\n".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock on the output folder, waiting for whoever has it. The system frees it when a holder dies."""
    path = paths.state() / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            print(f"another run (process {file.read() or 'unknown'}) is at work here; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpt2.study.notebooks", description="Run, clean and save.")
    command = parser.add_subparsers(required=True, metavar="run").add_parser("run", help="run notebooks and save them")
    command.add_argument("names", nargs="*", help="such as 03 or 03-peak; all if none is given")
    command.add_argument("-p", dest="parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    command.add_argument("--fast", action="store_true", help="set `fast` in the notebooks that have it")
    command.add_argument("--force", action="store_true", help="run also what is up to date")
    return parser.parse_args(words)


def _source(name: str) -> Path:
    wanted = Path(name).stem
    known = sorted(SOURCES.glob("*.ipynb"))
    found = [path for path in known if path.stem == wanted or path.stem.startswith(f"{wanted}-")]
    if len(found) != 1:
        there = ", ".join(path.stem for path in known) or "none"
        raise parameters.BadParameter(f"no notebook {name!r}; there are {there}")
    return found[0]


def _inputs() -> list[Path]:
    """The files every notebook may read: the package, the pins, and what this machine cannot make again."""
    package = paths.ROOT / "gpt2"
    files = [*package.rglob("*.py"), *package.rglob("*.mplstyle"), paths.ROOT / "requirements.txt"]
    for kind in ("published", "measured"):
        files += [path for base in {paths.ROOT, paths.out()} for path in (base / "results" / kind).rglob("*")]
    return sorted({path for path in files if path.is_file()})


def _is_current(stamp: Path, before: str) -> bool:
    try:
        kept = json.loads(stamp.read_text())
        return kept["fingerprint"] == before and all(_sha(Path(path)) == sha for path, sha in kept["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _write_stamp(stamp: Path, before: str, files: list[Path]) -> None:
    kept = {"fingerprint": before, "files": {str(path): _sha(path) for path in files if path.is_file()}}
    paths.write(stamp, json.dumps(kept, indent=1, sort_keys=True).encode())


def _journal(journal: Path) -> list[Path]:
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else []
    journal.unlink(missing_ok=True)
    return sorted({Path(line.partition(" ")[2]) for line in lines})


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _cell(source: str, number: int | None) -> str:
    return f"cell [{number}] `{_first_line(source)}`"


def _last_cell(draft: Path) -> str:
    """The cell that was running when the draft was last saved."""
    cells = nbformat.read(draft, as_version=4).cells if draft.is_file() else []
    code = [cell for cell in cells if cell.cell_type == "code"]
    started = [cell for cell in code if cell.metadata.get("papermill", {}).get("start_time")]
    return _cell(started[-1].source, len(started)) if started else "before the first cell"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
