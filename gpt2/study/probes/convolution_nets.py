"""The workspaces of the convolutions in whole nets, read out of the recordings of these nets.

`python -m gpt2.study.probes.convolution_nets` predicts every net that was recorded on the H200, but gives each
convolution's pass a workspace of a size that nothing else has. Where that one stands in the prediction, the recording
has what cuDNN really took, or nothing: results/measured/h200/convolution-nets.csv.gz, a line a pass and its shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

from gpt2.memory.kernels import convolution
from gpt2.memory.kernels.convolution_engines import Shape
from gpt2.memory.trace import Event, Trace
from gpt2.study import paths
from gpt2.study.experiments import EXPERIMENTS, Experiment, predict
from gpt2.study.probes.convolution_choices import FIELDS, NETS, OTHER_FIELDS, packed
from gpt2.study.words import parser

GPU, RELEASE = "H200", "2.11.0"
TRACES = "measured/h200/traces"
FIRST_MARK = 1_000_003  # bytes of the first pass's workspace in the prediction; the next one's are one more
AGREEING = 6  # allocations that must follow alike where a pass took nothing
FARTHEST = 500  # allocations to skip at most where the recording has something else, as a layer left out by chance


def marked(experiment: Experiment) -> tuple[Trace, list[Shape]]:
    """A prediction whose n-th convolution pass takes FIRST_MARK + n bytes, and the passes."""
    shapes: list[Shape] = []

    def mark(which, source, weight, out, stride, transposed, groups):
        if not convolution.known(source, out):
            return 0
        shapes.append(convolution.asked(which, source, weight, out, stride, transposed, groups))
        return FIRST_MARK + len(shapes) - 1

    with patch.object(convolution, "workspace_bytes", mark):
        return predict(experiment, GPU, torch_release=RELEASE), shapes


class Alignment:
    """The allocations of a recording beside those of its marked prediction."""

    def __init__(self, recorded: Trace, predicted: Trace, shapes: list[Shape]):
        self.real = [event for event in recorded.events if event.action == "alloc"]
        self.marked = [event for event in predicted.events if event.action == "alloc"]
        self.shapes = shapes

    def shape(self, event: Event) -> Shape | None:
        """The pass whose workspace this is."""
        n = event.requested_bytes - FIRST_MARK
        named = event.operator == convolution.WORKSPACE and 0 <= n < len(self.shapes)
        return self.shapes[n] if named else None

    def alike(self, j: int, i: int, left: int) -> bool:
        """Whether the next allocations are the same from here on, whatever the workspaces between them take."""
        while left and j < len(self.real) and i < len(self.marked):
            if self.shape(self.marked[i]):
                if self.alike(j, i + 1, left):
                    return True
                if "conv" not in self.real[j].operator:
                    return False
            elif self.real[j].requested_bytes != self.marked[i].requested_bytes:
                return False
            else:
                left -= 1
            i, j = i + 1, j + 1
        return True

    def resumed(self, j: int, i: int) -> tuple[int, int]:
        """Where they are alike again, skipping as little as possible."""
        for skipped in range(1, FARTHEST):
            for ahead in (skipped, 0, skipped // 2):
                at = j + ahead, i + skipped - ahead
                if at[0] < len(self.real) and at[1] < len(self.marked) and self.alike(*at, AGREEING - 2):
                    return at
        return len(self.real), len(self.marked)

    def taken(self) -> dict[Shape, int]:
        """Bytes of each pass's workspace."""
        found: dict[Shape, int] = {}
        i = j = 0
        while i < len(self.marked) and j < len(self.real):
            here = self.real[j]
            if shape := self.shape(self.marked[i]):
                if shape not in found:
                    nothing = "conv" not in here.operator or self.alike(j, i + 1, AGREEING)
                    found[shape] = 0 if nothing else here.requested_bytes
                j += bool(found[shape]) and here.requested_bytes == found[shape]
                i += 1
            elif here.requested_bytes == self.marked[i].requested_bytes:
                i, j = i + 1, j + 1
            else:
                j, i = self.resumed(j, i)
        return found


def recordings() -> Iterator[str]:
    """The nets recorded on this card with this release that are not of this study itself."""
    for name, experiment in sorted(EXPERIMENTS.items()):
        place = paths.ROOT / "results" / TRACES / f"{name}.json.gz"
        if experiment.subject and place.is_file():
            yield name


def passes(name: str) -> dict[Shape, int]:
    """Bytes that each convolution pass of a recorded net took."""
    recorded = Trace.load(paths.ROOT / "results" / TRACES / f"{name}.json.gz")
    return Alignment(recorded, *marked(EXPERIMENTS[name])).taken()


def main(words: list[str] | None = None) -> None:
    """Write the passes of all recordings, each shape once."""
    parser("probes.convolution_nets", __doc__).parse_args(words)
    lines: dict[Shape, dict] = {}
    for name in recordings():
        for shape, size in passes(name).items():
            lines.setdefault(shape, line(shape) | {"net": name, "bytes": size})
    facts = {
        "kind": "measured",
        "gpu": "NVIDIA H200",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "cudnn": 91900,
        "source": f"results/{TRACES}",
        "command": "python -m gpt2.study.probes.convolution_nets",
    }
    place = paths.results() / NETS
    written = paths.write(place, packed((*FIELDS, *OTHER_FIELDS), lines.values(), facts))
    print(f"{len(lines)} passes, {paths.shorten(place)} {'written' if written else 'as it was'}")


def line(shape: Shape) -> dict:
    """A shape as a line: sizes of two dimensions as `down x across`."""
    return {
        name: "x".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in shape._asdict().items()
    }


if __name__ == "__main__":
    main()
