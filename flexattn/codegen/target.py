"""What a device offers, as plain data: reads an architecture number, makes a Target the tile rules can ask."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}  # KiB a program may take
_PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}
_L2 = {80: 40, 86: 6, 89: 72, 90: 50, 100: 126, 120: 96}  # MiB


@dataclass(frozen=True, slots=True)
class Target:
    """A device as code generation sees it.

    Args:
        arch: Compute capability as one number (90 is sm_90); 0 is the interpreter.
        shared_bytes: Shared memory one program may take.
        processors: Streaming multiprocessors.
        l2_bytes: Size of the L2 cache.

    Example:
        >>> target_of(89).shared_bytes
        101376
    """

    arch: int
    shared_bytes: int
    processors: int
    l2_bytes: int

    @property
    def is_interpreter(self) -> bool:
        """Whether this stands for Triton's interpreter."""
        return self.arch == 0

    @property
    def family(self) -> str:
        """Which matrix instruction Triton uses: 'mma' (registers), 'wgmma' or 'tcgen05' (both read shared memory)."""
        if self.arch // 10 == 9:
            return "wgmma"
        return "tcgen05" if self.arch // 10 in (10, 11) else "mma"

    @property
    def has_descriptors(self) -> bool:
        """Whether tiles are loaded by the hardware through tensor descriptors, straight to where the products read."""
        return self.family != "mma"


INTERPRETER = Target(arch=0, shared_bytes=1 << 30, processors=1, l2_bytes=1 << 20)


def target_of(arch: int) -> Target:
    """The target of a compute capability; an unknown one gets the smallest shared memory, so that its tiles fit."""
    shared = _SHARED.get(arch, 99)
    return Target(arch, shared * KIB, _PROCESSORS.get(arch, 64), _L2.get(arch, 6) * KIB * KIB)
