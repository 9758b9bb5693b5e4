"""`python -m demo` (or `make demo`): six steps from two Python functions to a trained model. Exits 1 if a check fails.

On a machine with a GPU every step runs on its kernels, in bfloat16 but for the check against float64; elsewhere on the CPU path.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
from pathlib import Path

import torch
from torch import Tensor

import flexattn
from demo import measure, pictures
from demo.attention import alibi_slopes, causal_documents, dense_attention, soft_cap_and_alibi
from demo.model import CAP, sample
from demo.report import Progress, heading, table
from demo.text import START, PackedText, pack_topics
from demo.train import Recipe, falls, train
from flexattn.runtime.reference import oracle

OUT = Path(__file__).resolve().parent / "out"
SHOWN = 4096  # tokens in the pictures


def main() -> int:
    """Runs the steps in order; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--short", action="store_true", help="about a minute: shorter training, smaller comparison")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    OUT.mkdir(exist_ok=True)
    text = pack_topics()
    show_text(text, device)
    show_mask(text, device)
    right = check_slice(text, device)
    show_generated(text, device)
    learnt = learn(text, device, seconds=10 if options.short else 60)
    compare(device, short=options.short)
    print(f"\nPictures: {', '.join(str(OUT / name) for name in ('mask.png', 'mask_whole.png', 'loss.png'))}")
    return 0 if right and learnt else 1


def show_text(text: PackedText, device: torch.device) -> None:
    """Step 1: what is read."""
    lengths = torch.bincount(text.document.long())
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    heading("1. The text: Python's help topics, packed into one sequence")
    print(
        f"{len(text.titles)} documents of {int(lengths.min()):,} to {int(lengths.max()):,} characters, "
        f"{len(text.tokens):,} characters in all, {len(text.alphabet)} different ones; on {name}"
    )


def show_mask(text: PackedText, device: torch.device) -> None:
    """Step 2: the mask as Python, as a picture and in figures; first a window of it, then that of the whole text."""
    heading("2. The mask: causal, and no document looks into another")
    print(inspect.getsource(causal_documents))
    window = text.window(0, SHOWN).to(device)
    block_mask = build_mask(window.document)
    print(f"The first {SHOWN:,} characters in blocks of {block_mask.BLOCK_SIZE}:\n{block_mask}")
    save(block_mask, "mask.png", f"causal, documents: the first {SHOWN:,} characters")

    document, length = text.document.to(device), len(text.tokens)
    start = time.perf_counter()
    whole = build_mask(document)
    whole.tile_map(128, 128)
    seconds = time.perf_counter() - start
    print(
        f"The whole text, {length:,} x {length:,} pairs, which as a boolean matrix would be {length**2 / 1e9:,.0f} GB; "
        f"built in {1e3 * seconds:.0f} ms:"
    )
    print(textwrap.indent(str(whole.statistics()), "  "))
    save(whole, "mask_whole.png", f"causal, documents: all {length:,} characters")


def save(block_mask: flexattn.BlockMask, name: str, title: str) -> None:
    """The mask as a picture among the demo's results."""
    block_mask.figure(title=title).savefig(OUT / name, bbox_inches="tight")


def build_mask(document: Tensor) -> flexattn.BlockMask:
    """The demo's mask over one packed sequence."""
    length = len(document)
    return flexattn.create_block_mask(causal_documents(document), None, None, length, length, device=document.device)


def check_slice(text: PackedText, device: torch.device) -> bool:
    """Step 3: output and gradients on 384 characters around a document's end, against float64."""
    heading("3. Forward and backward against the dense float64 oracle")
    border = int(torch.nonzero(text.document.diff())[3])
    window = text.window(border - 250, 384).to(device)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, heads, 384, 48, generator=generator).to(device) for heads in (4, 2, 2, 4)]
    inputs.append(alibi_slopes(4).to(device))
    print("384 characters, two documents, 4 query heads on 2 key heads, head size 48, learnt slopes, float32\n")
    mask_mod = causal_documents(window.document)

    def ours(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        block_mask = build_mask(window.document)
        return flexattn.flex_attention(
            q, k, v, score_mod=soft_cap_and_alibi(CAP, slope), block_mask=block_mask, enable_gqa=True
        )

    def exact(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        return oracle(q, k, v, mask_mod=mask_mod, score_mod=soft_cap_and_alibi(CAP, slope.double()))[0]

    def dense(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return dense_attention(q, k, v, measure.dense_mask(window.document), soft_cap_and_alibi(CAP, slope))

    found, wanted, usual = (_with_gradients(f, inputs) for f in (ours, exact, dense))
    floor = 2e-5
    rows, right = [], True
    for name, x, y, z in zip(("out", "d query", "d key", "d value", "d slope"), found, wanted, usual):
        error, limit = _error(x, y), 2 * _error(z, y) + floor
        right &= error <= limit
        rows.append((name, f"{error:.1e}", f"{limit:.1e}", "right" if error <= limit else "WRONG"))
    print(table(("", "largest error", "allowed", ""), rows))
    print(
        "\n(error relative to the largest value, where that is over 1; allowed: twice the dense formula's own, "
        f"plus {floor:.0e})"
    )
    return right


def _with_gradients(attend, inputs: list[Tensor]) -> list[Tensor]:
    q, k, v, d_out, slope = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, slope)]
    out = attend(*leaves)
    out.backward(d_out.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact.double()).abs().max() / max(1.0, float(exact.abs().max())))


def show_generated(text: PackedText, device: torch.device) -> None:
    """Step 4: what the two functions became."""
    heading("4. What the two functions became")
    window = text.window(0, 1024).to(device)
    score_mod = soft_cap_and_alibi(CAP, alibi_slopes(4).to(device))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(1, 4, 1024, 64, device=device, dtype=dtype)
    print(flexattn.explain(q, q, q, score_mod=score_mod, block_mask=build_mask(window.document)))


def learn(text: PackedText, device: torch.device, *, seconds: float) -> bool:
    """Step 5: a model that uses it."""
    heading("5. Training a character-level transformer on the packed text")
    recipe = Recipe.of(device)
    flexattn.reset_stats()
    trained = train(text, recipe, seconds=seconds, device=device)
    pictures.draw_loss(trained.losses, OUT / "loss.png")
    first, last = sum(trained.losses[:5]) / 5, sum(trained.losses[-10:]) / len(trained.losses[-10:])
    print(
        f"{len(trained.losses)} steps of {recipe.length:,} characters, each with its own documents and its own mask; "
        f"loss {first:.2f} -> {last:.2f} nats a character"
    )
    prompt = torch.tensor([text.alphabet.index(c) for c in START + "The "], device=device)
    start = time.perf_counter()
    drawn = sample(trained.model, prompt, 100)
    print(
        f"100 characters of its own, at 100 different lengths ({time.perf_counter() - start:.1f} s): "
        f"{'The ' + text.decode(drawn)!r}"
    )
    count = flexattn.stats()
    print(
        f"counters over all of this: traces {count.traces.total():,}, plans {count.plans.total()}, "
        f"kernels built {count.builds.total()}, launches {count.launches.total():,}"
    )
    if not falls(trained.losses):
        print("WRONG: the loss did not fall by a fifth")
        return False
    return True


def compare(device: torch.device, *, short: bool) -> None:
    """Step 6: time and memory beside dense attention doing the same work."""
    heading("6. Time and peak memory against dense attention doing the same work")
    work = measure.Work.of(device, short=short)
    rounds = 1 if short else 3
    names = list(measure.RIVALS)
    with Progress("measuring", rounds * len(names)) as progress:
        done = iter(range(rounds * len(names)))
        costs = measure.compare(
            names,
            work,
            device,
            rounds=rounds,
            tick=lambda name: progress.show(next(done), f"{name}, a process of its own"),
        )
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    print(
        f"\nThe first {work.tokens:,} characters of the packed text, {work.heads} heads of {work.dim}, {dtype}, "
        "mask built each time;\nmemory is what is needed beyond the inputs, medians of "
        f"{rounds * work.repeats} runs in {rounds} process{'es' if rounds > 1 else ''} each\n"
    )
    rows: list[tuple[str, ...]] = []
    for title, ours, theirs, label in (
        ("causal, documents", "flexattn", "sdpa", "scaled_dot_product_attention"),
        ("... with soft-cap and ALiBi", "flexattn-softcap", "dense-softcap", "dense formula"),
    ):
        rows += [
            (title, "", "", "", ""),
            _row("flexattn", costs[ours]),
            _row(label, costs[theirs]),
            _ratio(costs[ours], costs[theirs]),
        ]
    print(table(("", "mask", "forward", "forward + backward", "peak memory"), rows))


def _row(label: str, cost: measure.Cost) -> tuple[str, ...]:
    if cost.failure:
        return f"  {label}", "", "", "", cost.failure
    return (
        f"  {label}",
        *(f"{1e3 * t:.2f} ms" for t in (cost.mask, cost.forward, cost.both)),
        f"{cost.memory / 2**20:,.0f} MiB",
    )


def _ratio(ours: measure.Cost, theirs: measure.Cost) -> tuple[str, ...]:
    if ours.failure or theirs.failure:
        return ("  dense / flexattn", "", "", "", "")
    pairs = zip(theirs[1:4], ours[1:4])
    return ("  dense / flexattn", "", *(f"{a / b:.1f} x" if b else "-" for a, b in pairs))


if __name__ == "__main__":
    sys.exit(main())
