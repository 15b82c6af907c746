"""A notebook's parameters: read from its one cell tagged `parameters`, checked before anything runs.

A notebook may limit them in its metadata:
`{"study": {"parameters": {"batch": {"min": 1, "max": 64}, "gpu": {"choices": ["A40", "H200"]}}}}`.
"""

import ast

import nbformat


class BadParameter(ValueError):
    """A parameter that no notebook has, or a value it cannot take; the message is one line for the user."""


def declared(notebook: nbformat.NotebookNode) -> dict:
    """Names and defaults of the parameters, in order; BadParameter unless there is exactly one cell of literals."""
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise BadParameter(f"{len(cells)} cells are tagged `parameters`, there must be one")
    defaults = {}
    try:
        for line in ast.parse(cells[0].source).body:
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            defaults[target.id] = ast.literal_eval(line.value)
    except (SyntaxError, AttributeError, ValueError) as error:
        raise BadParameter(f"the parameters cell holds more than `name = literal` ({error})") from error
    return defaults


def checked(name: str, text: str, notebook: nbformat.NotebookNode):
    """The value that `text` gives the parameter `name` of this notebook.

    Raises:
        BadParameter: not of the default's type, or outside the limits in the notebook's metadata, which hold for every
            member of a tuple.
    """
    default = declared(notebook)[name]
    value = _typed(name, text, default)
    limits = notebook.metadata.get("study", {}).get("parameters", {}).get(name, {})
    for part in value if isinstance(value, tuple | list) else (value,):
        _check(name, part, limits)
    return value


def _check(name: str, value, limits: dict) -> None:
    if "choices" in limits and value not in limits["choices"]:
        raise BadParameter(f"{name} = {value!r} is none of {', '.join(map(str, limits['choices']))}")
    if not {"min", "max"} & limits.keys():
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadParameter(f"{name} = {value!r} is not a number")
    if value < limits.get("min", value):
        raise BadParameter(f"{name} = {value!r} is below the least, {limits['min']}")
    if value > limits.get("max", value):
        raise BadParameter(f"{name} = {value!r} is above the most, {limits['max']}")


def _typed(name: str, text: str, default):
    if isinstance(default, str):
        return text
    if isinstance(default, bool) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        value = text
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if default is not None and type(value) is not type(default):
        raise BadParameter(f"{name} = {text} is not of the type of its default, {default!r}")
    return value
