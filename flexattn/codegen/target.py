"""What a device offers, as plain data: reads an architecture number, makes a Target the tile rules can ask."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
GFX942 = 942  # AMD's MI300, whose "architecture" is written as a number too
# KiB of shared memory a program may take
_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99, GFX942: 64}
_PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170, GFX942: 304}
_L2 = {80: 40, 86: 6, 89: 72, 90: 50, 100: 126, 120: 96, GFX942: 4}  # MiB; of one die there


@dataclass(frozen=True, slots=True)
class Target:
    """A device as code generation sees it.

    Args:
        arch: Compute capability as one number (90 is sm_90); 942 is AMD's gfx942; 0 is the interpreter.
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
    def is_amd(self) -> bool:
        """Whether this is an AMD GPU: kernels compile for it; no run has been seen."""
        return self.arch == GFX942

    @property
    def triton_target(self) -> tuple[str, int | str, int]:
        """Backend, architecture and threads of a warp, as Triton names them."""
        return ("hip", f"gfx{self.arch}", 64) if self.is_amd else ("cuda", self.arch, 32)

    @property
    def family(self) -> str:
        """Which matrix instruction Triton uses: 'mma' (registers; mfma on AMD), 'wgmma' or 'tcgen05' (both read shared
        memory)."""
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
