"""One colour per category, in every figure and widget, and how bytes are written.

Any two of the eleven colours keep 16 CAM02-UCS apart, for normal sight and for protanopia, deuteranopia and tritanopia.
"""

from __future__ import annotations

from gpt2.memory.trace import Category

COLOURS: dict[Category, str] = {
    Category.OUTSIDE: "#4D4D4D",
    Category.PARAMETERS: "#004B87",
    Category.OPTIMIZER: "#E69F00",
    Category.GRADIENTS: "#B84300",
    Category.ACTIVATIONS: "#009E73",
    Category.LOSS: "#782DF0",
    Category.INPUTS: "#88CCEE",
    Category.TEMPORARIES: "#B85C9E",
    Category.WORKSPACE: "#FFD287",
    Category.SLACK: "#3C1E00",
}
CACHED = "#E3E3E3"  # reserved and free: always drawn with an edge
CACHED_EDGE = "#8C8C8C"
INK, MUTED, FAINT = "#1A1A1A", "#5F5F5F", "#BDBDBD"
ALARM = "#C1121F"  # requests that fail, and the card's line
MARKERS = {"published": "s", "predicted": ".", "measured": "+", "recorded": "+"}  # how kinds of numbers are told apart

MIB, GIB = 2**20, 2**30


def owner(column: object) -> Category:
    """The category that a column or an event names; ValueError for another word."""
    return column if isinstance(column, Category) else Category(str(column))


def colour(category: object) -> str:
    """The one colour of a category, given as itself or as its value."""
    return COLOURS[owner(category)]


def ink_on(background: str) -> str:
    """White or near-black, whichever reads better on `#rrggbb`."""
    red, green, blue = (int(background[i:i + 2], 16) / 255 for i in (1, 3, 5))
    return "#FFFFFF" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.58 else INK


def tint(base: str, share: float) -> str:
    """`base` mixed with white: 1 is the colour, 0 is white."""
    return "#" + "".join(f"{round(255 + (int(base[i:i + 2], 16) - 255) * share):02X}" for i in (1, 3, 5))


def mib(count: float, digits: int = 1, *, sign: bool = False) -> str:
    """Bytes as `17,053.9 MiB`."""
    return f"{number(count / MIB, digits, sign=sign)} MiB"


def number(value: float, digits: int = 1, *, sign: bool = False) -> str:
    """`17,053.9`, with a real minus; zero has no sign."""
    text = f"{abs(value):,.{digits}f}"
    if not text.strip("0.,"):
        return text
    return ("−" if value < 0 else "+" if sign else "") + text


def size(count: float) -> str:
    """Bytes in the unit that suits them: `7.1 GiB`, `384.0 MiB`, `62.5 KiB`, `512 B`."""
    for unit, scale, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", 1024, 1)):
        if abs(count) >= scale:
            return f"{number(count / scale, digits)} {unit}"
    return f"{count:,.0f} B"
