"""Times a kernel's legal tiles on a call's own tensors and keeps the winner: reads a Question, makes a Tuned, stores a file.

The idea: the question is everything the answer may rest on (the spec without its tiles, the device, the Triton version, the
kernels' text, the candidates), with lengths and pairs rounded up to a power of two, so that a growing length is timed again
only when it doubles. The answer is kept in memory and as readable JSON in `cache_dir()/tuned`. It changes no result beyond
rounding, since every candidate is a legal kernel, and nothing here runs unless a call asks for it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexattn.codegen.emit import emit
from flexattn.codegen.spec import KernelSpec
from flexattn.codegen.tile_config import TileConfig
from flexattn.errors import StaleMaskError
from flexattn.runtime import device as devices
from flexattn.runtime import settings, stats, store
from flexattn.runtime.compile import announce

FORMAT = 1  # of the file
_ROUNDS, _FEWEST_ROUNDS = 15, 3
_SECONDS = 0.7  # after these no further round of timing starts
_TOO_SLOW = 1.5  # times the best: timed no further
_MARGIN = 1.02  # the default stays unless it is slower than the best by more
_DIFFERENT = 0.05  # of a result's norm: no rounding does that
_SPIN_CYCLES = 1_000_000  # half a millisecond in which the host gets ahead of the device
_SAY_AFTER = 5.0  # seconds between lines of progress
_WINNERS: dict[Question, Tuned] = {}
_LOCK = threading.RLock()


@dataclass(frozen=True, slots=True)
class Question:
    """Which of some tiles is fastest.

    Attributes:
        spec: the kernel, with the default's tiles.
        candidates: legal tiles, the default first.
        sizes: `size_class` of the call.
        device: where.
    """

    spec: KernelSpec
    candidates: tuple[TileConfig, ...]
    sizes: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one candidate: its median time, or why it has none."""

    config: TileConfig
    microseconds: float | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """An answer: the winner, every trial (the default's first), and the file it is in."""

    winner: TileConfig
    trials: tuple[Trial, ...]
    path: Path

    def __str__(self) -> str:
        times = {t.config: t.microseconds for t in self.trials}
        default = self.trials[0].config
        text = f"{_name(self.winner)}: {times[self.winner]:.1f} us"
        if self.winner == default:
            return f"{text}, as is the default"
        measured = times[default]
        return f"{text}, the default {_name(default)}: {'failed' if measured is None else f'{measured:.1f} us'}"


def size_class(*sizes: int) -> tuple[int, ...]:
    """Each size rounded up to a power of two.

    Example:
        >>> size_class(1, 1024, 1025)
        (1, 1024, 2048)
    """
    return tuple(1 << max(0, n - 1).bit_length() for n in sizes)


# ---------------------------------------------------------------- asking
def find(question: Question) -> Tuned | None:
    """The answer from memory or from disk; times nothing.

    Args:
        question: As `tune` will be asked.

    Returns:
        None where nobody has timed it; a file that cannot be trusted is announced and counts as none.
    """
    with _LOCK:
        found = _WINNERS.get(question)
        if found is None and (found := _read(question)) is not None:
            _WINNERS[question] = found
            stats.record_stored_tuning(question.spec.kernel, f"{found}, from {found.path}")
        return found


def tune(question: Question, run: Callable[[TileConfig], Any]) -> Tuned | None:
    """The answer, by timing where there is none yet. One thread times, others wait for what it finds.

    Args:
        question: What is asked.
        run: Builds and starts the kernel with some tiles on the call's tensors, into fresh results, which it returns.

    Returns:
        None where nothing may be timed (a CUDA graph is being captured) or no candidate runs: the default is for then.
    """
    with _LOCK:
        found = find(question)
        if found is not None:
            return found
        if devices.is_capturing(question.device):
            settings.warn_once(
                f"capture {question.spec.kernel}",
                f"flexattn: the {question.spec.kernel} kernel is not autotuned while a CUDA graph is captured and runs "
                "with its default tiles; call it once before the capture",
                settings.FlexPerformanceWarning,
            )
            return None
        trials = _time_all(question, run)
        winner = _winner(trials)
        if winner is None:
            return None
        found = _WINNERS[question] = Tuned(winner, trials, _path(_identity(question)))
        stats.record_tuning(question.spec.kernel, str(found))
        _write(question, found)
        return found


def clear() -> None:
    """Forgets every winner in memory; files stay (for tests)."""
    with _LOCK:
        _WINNERS.clear()


def _winner(trials: Sequence[Trial]) -> TileConfig | None:
    """The fastest, but the default (the first) where it is as good as that."""
    timed = {t.config: t.microseconds for t in trials if t.microseconds is not None}
    if not timed:
        return None
    best, default = min(timed, key=lambda c: timed[c]), trials[0].config
    return default if timed.get(default, float("inf")) <= _MARGIN * timed[best] else best


# ---------------------------------------------------------------- timing
@dataclass
class _Entrant:
    """A candidate on its way to a Trial."""

    spec: KernelSpec
    run: Callable[[], Any]
    times: list[float] = field(default_factory=list)
    difference: float = 0.0
    error: str | None = None

    def attempt(self, action: Callable[[], Any]) -> Any:
        """The action's result; None where it fails, which is announced and rules this candidate out."""
        try:
            return action()
        except StaleMaskError:
            raise  # the caller's mistake, whatever the tiles
        except Exception as error:  # compilers and drivers fail in many ways
            self.rule_out(error)
            return None

    def rule_out(self, error: Exception) -> None:
        self.error = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        announce(self.spec, error)


def _time_all(question: Question, run: Callable[[TileConfig], Any]) -> tuple[Trial, ...]:
    configs = question.candidates
    entrants = [_Entrant(dataclasses.replace(question.spec, config=c), functools.partial(run, c)) for c in configs]
    _warm_up(entrants, question.device)
    _race(entrants, question.device)
    medians = [round(statistics.median(e.times), 2) if e.times and e.error is None else None for e in entrants]
    return tuple(Trial(c, m, e.error) for c, m, e in zip(configs, medians, entrants))


def _warm_up(entrants: list[_Entrant], device: torch.device) -> None:
    """Builds and runs each once. One that disagrees with the default, while other tiles agree with it, is ruled out."""
    default: Any = None
    begun = said = time.monotonic()
    for number, entrant in enumerate(entrants):
        if (now := time.monotonic()) - said > _SAY_AFTER:
            said = now
            progress = f"{number} of {len(entrants)} configurations built after {now - begun:.0f} s"
            print(f"flexattn: autotuning the {entrant.spec.kernel} kernel: {progress}", file=sys.stderr)
        results = entrant.attempt(functools.partial(_finished, entrant.run, device))
        if number == 0:
            default = results
        elif default is not None and entrant.error is None:
            entrant.difference = difference(results, default)
    tiles = lambda e: (e.spec.config.BLOCK_M, e.spec.config.BLOCK_N)
    running = [e for e in entrants if e.error is None]
    if any(e.difference <= _DIFFERENT and tiles(e) != tiles(entrants[0]) for e in running):
        for entrant in running:
            if not entrant.difference <= _DIFFERENT:
                text = f"results differ from the default's by {entrant.difference:.0%} of their norm"
                entrant.rule_out(RuntimeError(text))


def _race(entrants: list[_Entrant], device: torch.device) -> None:
    """Rounds in which everybody runs once, so that a clock that drifts is fair; who is far behind drops out."""
    begun = time.monotonic()
    running = [e for e in entrants if e.error is None]
    for number in range(_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.monotonic() - begun > _SECONDS:
            return
        for entrant in running:
            spent = entrant.attempt(functools.partial(microseconds, entrant.run, device))
            entrant.times += [] if spent is None else [spent]
        running = [e for e in running if e.error is None]
        best = min((statistics.median(e.times) for e in running), default=0.0)
        running = [e for e in running if statistics.median(e.times) <= _TOO_SLOW * best]


def microseconds(run: Callable[[], Any], device: torch.device) -> float:
    """How long the device takes for one run, with an L2 cache that holds nothing of its inputs.

    The device is kept busy first, so that the host's work for the launch does not count.
    """
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - begun)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SPIN_CYCLES)
    torch.empty(2 * devices.target_for(device).l2_bytes, dtype=torch.int8, device=device).zero_()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop)


def _finished(run: Callable[[], Any], device: torch.device) -> Any:
    """The results of a run that is over, so that its failure shows here."""
    results = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return results


def difference(results: Any, expected: Any) -> float:
    """The largest of the results' differences, each as a share of the expected tensor's norm; NaN counts as infinite."""
    worst = 0.0
    for a, b in zip(_tensors(results), _tensors(expected)):
        apart = torch.where(a == b, 0.0, a - b)  # equal infinities are no difference
        kind = torch.promote_types(b.dtype, torch.float32)
        size = torch.linalg.vector_norm(torch.where(b.isfinite(), b, 0.0), dtype=kind)
        share = (torch.linalg.vector_norm(apart, dtype=kind) / size.clamp_min(1e-30)).item()
        worst = max(worst, share if share == share else float("inf"))
    return worst


def _tensors(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, tuple):
        for result in results:
            yield from _tensors(result)


# ---------------------------------------------------------------- on disk
def _identity(question: Question) -> dict[str, Any]:
    """The question as JSON says it; whatever could make another answer right is in here."""
    spec = question.spec
    facts = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    programs = {name: None if facts[name] is None else str(facts[name]) for name in ("score", "mask")}
    functions = emit(spec).leaf_hash  # exact where a program's one line may not tell two apart
    sizes = dict(zip(("q_len", "kv_len", "pairs"), question.sizes))
    identity = {
        "kernel": spec.kernel,
        "device": torch.cuda.get_device_name(question.device) if question.device.type == "cuda" else "interpreter",
        "triton": _triton_version(),
        "sizes up to": sizes,
        **programs,
        "spec": {k: v for k, v in facts.items() if k not in ("kernel", "config", *programs)},
        "candidates": list(question.candidates),
        "generated functions": functions,
        "kernel text": store.skeletons(),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity, default=dataclasses.asdict))
    return plain


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _path(identity: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    return settings.cache_dir() / "tuned" / f"{digest}.json"


def _read(question: Question) -> Tuned | None:
    identity = _identity(question)
    path = _path(identity)
    try:
        winner, trials = _parse(path.read_text(), identity, question.candidates)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:  # whatever is wrong with it, it is not trusted
        settings.warn_once(
            f"tuned {path} {error}",
            f"flexattn: the stored autotuning result {path} is not used and will be timed again "
            f"({type(error).__name__}: {error})",
            settings.FlexPerformanceWarning,
        )
        return None
    return Tuned(winner, trials, path)


def _parse(
    text: str, identity: dict[str, Any], candidates: Sequence[TileConfig]
) -> tuple[TileConfig, tuple[Trial, ...]]:
    """Winner and trials of a file's text; an exception that says what is wrong with it."""
    stored = json.loads(text)
    if stored["format"] != FORMAT or stored["question"] != identity:
        raise ValueError("it answers another question")
    trials = tuple(Trial(TileConfig(**t["tiles"]), t["microseconds"], t["error"]) for t in stored["trials"])
    winner = TileConfig(**stored["winner"])
    if winner not in candidates:
        raise ValueError(f"its winner is not legal here: {_name(winner)}")
    timed = [t.config for t in trials if t.microseconds is not None and t.microseconds > 0]
    if tuple(t.config for t in trials) != tuple(candidates) or winner not in timed:
        raise ValueError("its trials are not the candidates, or the winner was not timed")
    return winner, trials


def _write(question: Question, tuned: Tuned) -> None:
    trials = [
        {"tiles": dataclasses.asdict(t.config), "microseconds": t.microseconds, "error": t.error} for t in tuned.trials
    ]
    content = {
        "format": FORMAT,
        "winner": dataclasses.asdict(tuned.winner),
        "trials": trials,
        "question": _identity(question),
    }
    try:
        settings.write_whole(tuned.path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        settings.warn_once(
            f"write {tuned.path.parent}",
            f"flexattn: the autotuning result is kept in memory only, {tuned.path} cannot be written ({error}); "
            "FLEXATTN_CACHE_DIR names another folder",
            settings.FlexPerformanceWarning,
        )


def _name(config: TileConfig) -> str:
    return f"{config.BLOCK_M}x{config.BLOCK_N}, {config.num_warps} warps, {config.num_stages} stages"


__all__ = ["Question", "Trial", "Tuned", "clear", "difference", "find", "microseconds", "size_class", "tune"]
