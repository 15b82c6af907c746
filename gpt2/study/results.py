"""Tables and figures as files: each says where it comes from, and a run that finds nothing new changes nothing.

A table is CSV with a header of `# key: json` lines, its provenance. Every table is of one kind: `published` (with a
source), `measured` (on a named GPU) or `predicted` (computed without one). A figure carries its finding as alt text.
"""

import datetime
import functools
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import matplotlib
import pandas as pd

from gpt2.study import paths

# What may differ between two runs that found the same; see `save_table`.
VOLATILE = frozenset({"date", "commit", "dirty", "command", "free_bytes"})
SHORTEST_ALT = 40
DATE = "%Y-%m-%dT%H:%M:%SZ"
STYLE = Path(__file__).with_name("study.mplstyle")


def table_path(kind: str, name: str, gpu: str | None = None) -> Path:
    """Where the table `name` (such as `04-sweep`) of this kind is written: results/<kind>/[<gpu>/]<name>.csv."""
    return paths.results_of(kind, gpu) / f"{name}.csv"


def provenance(
    kind: str, *, gpu: str | None = None, config: dict | None = None, seed: int | None = None, **more
) -> dict:
    """Where a table comes from: the facts of its header.

    Args:
        kind: "published", "measured" or "predicted".
        gpu: the GPU it was measured on, or is predicted for.
        config: what was run (batch, length, ...); anything JSON can hold.
        more: further facts; `source` for published tables, `torch` if it is not the installed one.

    A measured table names CUDA, driver and the free bytes at the start. The date of a predicted one is the commit's, so
    that the same commit gives the same bytes on any day and any machine.
    """
    facts = {"kind": kind, "gpu": gpu, "torch": version("torch").split("+")[0], "config": config, "seed": seed}
    if kind == "published":
        del facts["torch"]
    else:
        facts |= _commit(paths.ROOT)
        facts["command"] = command_line()
    if kind == "measured":
        facts |= _machine()
        facts["date"] = datetime.datetime.now(datetime.UTC).strftime(DATE)
    facts |= more
    return {key: value for key, value in facts.items() if value is not None}


def command_line() -> str:
    """The command that is at work, without any path of this machine."""
    named = os.environ.get("STUDY_COMMAND")
    if named:
        return named
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is None or spec.name.startswith("ipykernel"):
        return Path(sys.argv[0]).name
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return " ".join(["python -m", spec.name.removesuffix(".__main__"), *words])


def save_table(table: pd.DataFrame, path: str | os.PathLike, provenance: dict) -> pd.DataFrame:
    """Write a tidy table with its provenance; returns it with the provenance as `.attrs`, ready to be shown.

    The file is left alone when it holds the same table from the same configuration: then its date stands. Columns in
    bytes or counts are written as integers, also where some are missing.

    Raises:
        ValueError: kind missing or unknown, in conflict with the folder, or without what the kind demands.
    """
    path = paths.results() / path
    _check(provenance, path)
    body = _csv(table)
    shown = table.copy()
    shown.attrs = dict(provenance)
    if path.is_file():
        facts, old_body = _split(path.read_text(encoding="utf-8"))
        if old_body == body and _lasting(facts) == _lasting(provenance):
            paths.note("wrote", path)
            shown.attrs = facts
            return shown
    header = "".join(f"# {key}: {_json(value)}\n" for key, value in provenance.items())
    paths.write(path, (header + body).encode())
    return shown


def load_table(path: str | os.PathLike) -> pd.DataFrame:
    """Read a table; its provenance is in `.attrs`. Relative paths are relative to results/, see `paths.find`."""
    facts, body = _split(paths.find(path).read_text(encoding="utf-8"))
    table = pd.read_csv(io.StringIO(body))
    table.attrs = facts
    return table


@dataclass(frozen=True)
class Picture:
    """A saved figure as a notebook shows it: the bytes of the file, with the alt text where no picture can be shown."""

    png: bytes
    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/png": self.png, "text/plain": self.alt}, {"image/png": {"alt": self.alt}}


def save_figure(figure, name: str, alt: str) -> Picture:
    """Write figures/<name>.png and .svg, both with the alt text inside, and return what a notebook shows.

    Args:
        figure: a matplotlib Figure.
        name: such as `03-peak-by-owner`.
        alt: the finding in words, for those who do not see the picture; at least 40 characters.

    The same figure gives the same bytes, and equal files are left alone.
    """
    alt = " ".join(alt.split())
    if len(alt) < SHORTEST_ALT:
        raise ValueError(f"alt text of {name}: {len(alt)} characters; state the finding in at least {SHORTEST_ALT}")
    with matplotlib.rc_context({"svg.hashsalt": name}, fname=STYLE if STYLE.is_file() else None):
        png = _render(figure, "png", {"Software": None, "Title": name, "Description": alt})
        svg = _render(figure, "svg", {"Date": None, "Creator": None, "Title": name, "Description": alt})
    paths.write(paths.figures() / f"{name}.png", png)
    paths.write(paths.figures() / f"{name}.svg", _describe(svg.decode(), alt).encode())
    return Picture(png, alt)


def _render(figure, form: str, facts: dict) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, metadata=facts)
    return buffer.getvalue()


def _describe(svg: str, alt: str) -> str:
    """Give the picture the <desc> that screen readers read (matplotlib writes only the <title>)."""
    escaped = alt.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return svg.replace("</title>", f"</title>\n <desc>{escaped}</desc>", 1).replace("<svg ", '<svg role="img" ', 1)


def _check(facts: dict, path: Path) -> None:
    kind = facts.get("kind")
    if kind not in paths.KINDS:
        raise ValueError(f"{path.name}: provenance needs a kind, one of {', '.join(paths.KINDS)}; got {kind!r}")
    demanded = {"published": "source", "measured": "gpu", "predicted": "torch"}[kind]
    if not facts.get(demanded):
        raise ValueError(f"{path.name}: a {kind} table must name its {demanded}")
    folders = path.relative_to(paths.results()).parts[:-1] if path.is_relative_to(paths.results()) else ()
    if folders and folders[0] != kind:
        raise ValueError(f"{path.name}: a {kind} table does not belong in results/{folders[0]}/")


def _csv(table: pd.DataFrame) -> str:
    floats = table.select_dtypes("float").columns
    whole = [name for name in floats if name.endswith(("_bytes", "_count")) and (table[name].dropna() % 1 == 0).all()]
    return table.astype(dict.fromkeys(whole, "Int64")).to_csv(index=False, lineterminator="\n")


def _split(text: str) -> tuple[dict, str]:
    """The header as a dict, and the rest."""
    facts = {}
    while text.startswith("# "):
        line, _, text = text.partition("\n")
        key, _, value = line[2:].partition(": ")
        facts[key] = json.loads(value)
    return facts, text


def _lasting(facts: dict) -> dict:
    return json.loads(_json({key: value for key, value in facts.items() if key not in VOLATILE}))


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=_plain)


def _plain(value):
    """numpy's numbers and paths as JSON; anything else is an error."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a header")


@functools.lru_cache
def _commit(root: Path) -> dict:
    """Commit, its date, and whether the code (not the results) differs from it; nothing where there is no git."""

    def git(*words: str) -> str:
        command, utc = ["git", "-C", str(root), *words], os.environ | {"TZ": "UTC"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=utc).stdout.strip()

    try:
        commit, date = git("log", "-1", "--format=%H %cd", f"--date=format-local:{DATE}").split()
        dirty = bool(git("status", "--porcelain", "--", "gpt2", "requirements.txt"))
        return {"date": date, "commit": commit, "dirty": dirty}
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}


@functools.lru_cache
def _machine() -> dict:
    """CUDA, driver and free bytes of the real GPU at hand."""
    import torch  # slow, and not needed to read a table

    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {"cuda": torch.version.cuda, "driver": driver, "free_bytes": torch.cuda.mem_get_info()[0]}
