"""The instrument: traces of an allocator, the allocator itself, a GPU that is not here, a recorder for one that is."""


def __getattr__(name: str):
    """`SimulatedGpu` and `Recorder`, loaded when asked for: the rest of the package does not need PyTorch."""
    if name == "SimulatedGpu":
        from gpt2.memory.simulator import SimulatedGpu

        return SimulatedGpu
    if name == "Recorder":
        from gpt2.memory.recorder import Recorder

        return Recorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
