"""What a notebook keeps when it is saved: what a reader sees, and nothing that differs between two equal runs."""

import re
import tempfile
from pathlib import Path

import nbformat

from gpt2.study import paths

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PICTURES = ("image/png", "image/svg+xml", "image/jpeg", "text/html")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "pygments_lexer": "ipython3",
    },
}
_WARNING = re.compile(r"^.*:\d+: (?P<what>\w+Warning: .*)\n(?:  .*\n?)?", re.MULTILINE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CELL_FILE = re.compile(re.escape(tempfile.gettempdir()) + r"/ipykernel_\d+/\d+\.py")


class NothingToSee(ValueError):
    """An output that shows only to those who run a kernel or JavaScript."""


def clean(notebook: nbformat.NotebookNode) -> list[str]:
    """Make `notebook` fit to be kept, in place; returns the warnings taken out of its outputs.

    Gone are timings, papermill's notes, widget state and view ids, addresses, paths of this machine and progress
    residue; executions count 1 to n.

    Raises:
        NothingToSee: a widget without a picture and a text beside it.
    """
    warnings = []
    title = {key: notebook.metadata[key] for key in ("study", "title") if key in notebook.metadata}
    notebook.metadata = nbformat.from_dict(METADATA | title)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for number, cell in enumerate(notebook.cells, start=1):
        cell.setdefault("id", f"cell-{number:02}")
        cell.metadata = nbformat.from_dict(_lasting(cell.metadata))
        if cell.cell_type == "code":
            count += bool(cell.source.strip())
            cell.execution_count = count if cell.source.strip() else None
            cell.outputs = _outputs(cell, number, warnings)
    return warnings


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as its author wrote it: cells without outputs and without what papermill injected."""
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    clean(notebook)
    return notebook


def dumps(notebook: nbformat.NotebookNode) -> bytes:
    """The bytes of a notebook's file; ValueError if it breaks the format."""
    nbformat.validate(notebook)
    return (nbformat.writes(notebook) + "\n").encode()


def _lasting(metadata: dict) -> dict:
    return {key: metadata[key] for key in ("jupyter", "tags") if metadata.get(key)}


def _outputs(cell, number: int, warnings: list[str]) -> list:
    """A cell's outputs: neighbouring streams joined, each output cleaned, empty ones dropped."""
    kept = []
    for output in cell.outputs:
        if output.output_type == "stream" and kept and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            _clean_stream(output, warnings)
        elif output.output_type == "error":
            output.traceback = [_anonymous(line) for line in output.traceback]
        else:
            _clean_data(output, number)
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
    return [output for output in kept if output.get("text", "kept")]


def _clean_stream(output, warnings: list[str]) -> None:
    text = output.text
    if output.name == "stderr":
        warnings += [found["what"] for found in _WARNING.finditer(text)]
        text = _WARNING.sub("", text)
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    output.text = _anonymous("\n".join(lines))


def _clean_data(output, number: int) -> None:
    """Drop the view of a widget; its text becomes the alt text of its picture, for pages without a kernel."""
    data = output.data
    for kind in list(data):
        if kind.startswith("text/"):
            data[kind] = _anonymous(data[kind])
    if data.pop(WIDGET_VIEW, None) is not None:
        if "text/plain" not in data or not any(kind in data for kind in PICTURES):
            raise NothingToSee(f"cell {number} shows a widget without a picture and a text beside it")
        if "image/png" in data:
            output.metadata.setdefault("image/png", {}).setdefault("alt", " ".join(data["text/plain"].split()))


def _anonymous(text: str) -> str:
    """`text` without addresses and without this machine's folders."""
    text = _CELL_FILE.sub("cell", _ADDRESS.sub("", text))
    for folder, name in ((paths.out(), ""), (paths.ROOT, ""), (Path.home(), "~/")):
        if len(folder.parts) > 1:
            text = text.replace(f"{folder}/", name).replace(str(folder), name.rstrip("/") or ".")
    return text
