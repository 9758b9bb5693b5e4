"""PagedKVCache: any sequence of its operations against dense tensors, what attention over it gives, and every error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import flexattn
from flexattn import PagedKV, PagedKVCache, flex_attention, paged_attention
from flexattn.errors import (
    CallError,
    DeviceError,
    DTypeError,
    OptionError,
    OutOfPagesError,
    PageTableError,
    ShapeError,
    UnsupportedError,
)
from tests.helpers import assert_explains, causal, on_devices

HEADS, DIMS = 2, (32, 24)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def make(num_pages: int = 64, page_size: int = 16, **facts) -> PagedKVCache:
    """A small cache whose pages hold NaN."""
    facts = {
        "kv_heads": HEADS, "qk_dim": DIMS[0], "v_dim": DIMS[1], "dtype": torch.float32, "device": "cpu", "max_requests": 12,
        "max_length": 256, **facts,
    }  # fmt: skip
    cache = PagedKVCache(num_pages, page_size, **facts)
    for pool in (cache._k, cache._v):
        (pool.view(torch.uint8).fill_(127) if pool.dtype.itemsize == 1 else pool.fill_(math.nan))
    return cache


def grow(
    cache: PagedKVCache, slots: list[int], counts: list[int], *, layers=(0,)
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Reserves and appends random tokens, other ones in each layer; what was appended, [tokens, heads, dim] a layer."""
    cache.reserve(slots, counts)
    made = []
    for layer in layers:
        k, v = (torch.randn(sum(counts), HEADS, dim, device=cache.device) for dim in DIMS)
        cache.append(layer, slots, k, v, counts)
        made.append((k, v))
    return made


def assert_holds(pages: PagedKV, b: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """That request b of a view has exactly these tokens, [tokens, heads, dim]."""
    assert pages.kv_lengths[b] == len(k)
    for found, wanted in zip(pages.gathered(torch.float32), (k, v)):
        assert torch.equal(found[b, :, : len(k)].transpose(0, 1), wanted)


# ---------------------------------------------------------------- any sequence of operations
class Requests(RuleBasedStateMachine):
    """A cache of few pages beside dense tensors: token t of layer l has the key and value that (t, position, l) makes."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(14, 4, max_requests=5, max_length=24, layers=2, layout="NHD")
        self.tokens: dict[int, list[int]] = {}

    def content(self, tokens: list[int], layer: int, first: int = 0) -> list[torch.Tensor]:
        numbers = [hash(tuple(tokens[: n + 1])) % 997 + layer for n in range(first, len(tokens))]
        x = torch.tensor(numbers, dtype=torch.float32)[:, None, None]
        return [x.expand(-1, HEADS, dim) + torch.arange(dim) for dim in DIMS]

    def grow(self, news: dict[int, list[int]]) -> None:
        """Several requests at once; where pages run out, nothing changes."""
        slots, counts = list(news), [len(x) for x in news.values()]
        before = self.state()
        try:
            self.cache.reserve(slots, counts)
        except (OutOfPagesError, ShapeError) as error:
            assert_explains(error)
            assert self.state() == before
            return
        for layer in range(2):
            parts = []
            for slot, new in news.items():
                parts.append(self.content(self.tokens[slot] + new, layer, len(self.tokens[slot])))
            self.cache.append(layer, slots, *(torch.cat(x) for x in zip(*parts)), counts)
        for slot, new in news.items():
            self.tokens[slot] = self.tokens[slot] + new

    def state(self):
        table = self.cache._table
        held = {slot: table.pages_of(slot) for slot in self.tokens}
        return held, list(table._free), list(table._known.idle), dict(table._known._key), table.lengths.tolist()

    @rule(tokens=st.lists(st.integers(0, 1), max_size=14), remembers=st.booleans())
    def allocate(self, tokens, remembers) -> None:
        try:
            slot, cached = self.cache.allocate(tokens)
        except OutOfPagesError:
            assert len(self.tokens) == 5
            return
        assert cached % 4 == 0 and (cached < len(tokens) or cached == 0)
        self.tokens[slot] = tokens[:cached]
        self.grow({slot: tokens[cached:]})
        if remembers:
            self.cache.remember(slot, self.tokens[slot])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def extend(self, data) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1))
        self.grow({slot: data.draw(st.lists(st.integers(0, 1), max_size=6)) for slot in slots})

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        if len(self.tokens) < 5:
            self.tokens[self.cache.fork(slot)] = self.tokens[slot]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        kept = data.draw(st.integers(0, len(self.tokens[slot])))
        self.cache.truncate(slot, kept)
        self.tokens[slot] = self.tokens[slot][:kept]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def remember(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.remember(slot, self.tokens[slot])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.cache.free(slot)
        del self.tokens[slot]

    @invariant()
    def everything_is_there(self) -> None:
        self.cache.check()
        slots = list(self.tokens)
        for layer in range(2):
            view = self.cache.view(slots, layer)
            for b, slot in enumerate(slots):
                assert_holds(view, b, *self.content(self.tokens[slot], layer))
        assert self.cache.pages_used == len({p for s in slots for p in self.cache._table.pages_of(s)})


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRequests = Requests.TestCase


# ---------------------------------------------------------------- C43: slots of a cache, one freed and its pages used again
@on_devices
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_c43_slots_and_pages(device, layout) -> None:
    cache = make(layout=layout, device=device)
    for _ in range(10):
        cache.allocate()
    slots, lengths = [6, 2, 9], [37, 100, 64]
    for slot in set(range(10)) - set(slots):
        cache.free(slot)
    ((k, v),) = grow(cache, slots, lengths)
    kept = dict(zip(slots, zip(k.split(lengths), v.split(lengths))))
    q = torch.randn(3, 4, 1, DIMS[0], device=device)

    def check(slots) -> None:
        cache.check()
        view = cache.view(slots)
        out = paged_attention(q[: len(slots)], view, mask_mod=causal)
        for b, slot in enumerate(slots):
            assert_holds(view, b, *kept[slot])
            keys, values = (x.transpose(0, 1)[None] for x in kept[slot])
            alone = flex_attention(q[b : b + 1], keys, values, enable_gqa=True)
            assert torch.allclose(out[b : b + 1], alone, atol=1e-5)

    check(slots)
    old = cache._table.pages_of(2)
    cache.free(2)
    check([6, 9])
    slot = cache.allocate().slot
    ((k, v),) = grow(cache, [slot], [90])
    kept[slot] = k, v
    assert set(cache._table.pages_of(slot)) <= set(old)
    check([9, slot, 6])


# ---------------------------------------------------------------- sizes, layouts and types
@on_devices
@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 64, 512, 672])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_page_sizes(device, page_size, layout) -> None:
    """Prefill in two pieces and a step, against dense keys; as many pages as tokens need."""
    cache = make(1500, page_size, layout=layout, device=device, max_length=1000)
    slots, total = [cache.allocate().slot for _ in range(3)], [[], [], []]
    for counts in ([5, 700, 0], [17, 3, 1], [1, 1, 1]):
        ((k, v),) = grow(cache, slots, counts)
        for b, part in enumerate(zip(k.split(counts), v.split(counts))):
            total[b].append(part)
    cache.check()
    lengths = [23, 704, 2]
    assert cache.pages_used == sum(-(-n // page_size) for n in lengths)
    view, q = cache.view(slots), torch.randn(3, 4, 1, DIMS[0], device=device)
    out = paged_attention(q, view, mask_mod=causal)
    for b, parts in enumerate(total):
        keys, values = (torch.cat(x) for x in zip(*parts))
        assert_holds(view, b, keys, values)
        alone = flex_attention(q[b : b + 1], *(x.transpose(0, 1)[None] for x in (keys, values)), enable_gqa=True)
        assert torch.allclose(out[b : b + 1], alone, atol=1e-5)


@on_devices
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor([0.03, 4.0])])
def test_8_bits_and_scales(device, dtype, scale) -> None:
    """Stored is what torch rounds of x / scale; what is too large becomes the largest; a view multiplies again."""
    cache = make(dtype=dtype, k_scale=scale, v_scale=0.25, device=device)
    slot = cache.allocate().slot
    cache.reserve([slot], [20])
    k, v = (torch.randn(1, HEADS, 20, dim, device=device) * 30 for dim in DIMS)
    k[0, :, 3, 5] = 1e7
    cache.append(0, [slot], k.bfloat16(), v)
    view, limit = cache.view([slot]), torch.finfo(dtype).max
    factors = torch.ones(1, device=device) if scale is None else torch.as_tensor(scale, device=device).reshape(-1)
    for found, x, by in zip(
        view.gathered(torch.float32), (k.bfloat16().float(), v), (factors, torch.full((1,), 0.25, device=device))
    ):
        by = by[None, :, None, None]
        assert torch.equal(found[:, :, :20], (x * (1 / by)).clamp(-limit, limit).to(dtype).float() * by)
    assert (view.gathered(torch.float32)[0][0, :, 3, 5] == limit * factors).all()
    out = paged_attention(torch.randn(1, 4, 1, DIMS[0], device=device, dtype=torch.bfloat16), view)
    assert torch.isfinite(out).all()


def test_scales_of_layers() -> None:
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    cache = make(dtype=FP8[0], layers=2, k_scale=scales)
    slot = cache.allocate().slot
    assert torch.equal(cache.view([slot], 1).k_scale, scales[1])
    assert cache.view([slot], 1).v_scale is None


@on_devices
def test_values_within_keys(device) -> None:
    cache = make(qk_dim=48, v_dim=32, kv_heads=1, v_in_k=True, device=device)
    slot = cache.allocate().slot
    cache.reserve([slot], [33])
    k = torch.randn(1, 1, 33, 48, device=device)
    cache.append(0, [slot], k)
    view = cache.view([slot])
    assert view.v_pages.data_ptr() == view.k_pages.data_ptr()
    other = cache.fork(slot)
    cache.reserve([other], [1])
    cache.append(0, [other], k[:, :, :1])
    for s, wanted in ((slot, k), (other, torch.cat([k, k[:, :, :1]], 2))):
        q = torch.randn(1, 8, 1, 48, device=device)
        alone = flex_attention(q, wanted, wanted[..., :32], enable_gqa=True)
        assert torch.allclose(paged_attention(q, cache.view([s])), alone, atol=1e-5)


@on_devices
def test_layers_and_those_that_share(device) -> None:
    """Each layer has its own keys but the ones that read another's, which take no memory."""
    cache = make(layers=5, shared_layers={2: 0, 4: 3}, device=device)
    slot = cache.allocate().slot
    made = dict(zip((0, 1, 3), grow(cache, [slot], [40], layers=(0, 1, 3))))
    for layer, home in enumerate((0, 1, 0, 3, 3)):
        assert_holds(cache.view([slot], layer), 0, *made[home])
    assert cache._k.shape[0] == 3
    with pytest.raises(CallError) as caught:
        cache.append(2, [slot], *made[0], [40])
    assert_explains(caught.value, "layer 2", "layer 0")


# ---------------------------------------------------------------- shared pages
@on_devices
def test_a_fork_copies_its_last_page_when_it_grows(device) -> None:
    cache = make(device=device, layers=2)
    slot = cache.allocate().slot
    grow(cache, [slot], [40], layers=(0, 1))
    before = [cache.view([slot], layer).gathered(torch.float32) for layer in (0, 1)]
    other = cache.fork(slot)
    assert cache.pages_used == 3
    grow(cache, [other, slot], [1, 30], layers=(0, 1))
    assert cache.pages_used == 6
    assert cache._table.pages_of(slot)[:2] == cache._table.pages_of(other)[:2]
    for layer in (0, 1):
        for new, old in zip(cache.view([slot, other], layer).gathered(torch.float32), before[layer]):
            assert torch.equal(new[:, :, :40], old[:, :, :40].expand(2, -1, -1, -1))
    cache.check()


def test_whole_pages_of_known_prefixes_are_reused() -> None:
    cache, tokens = make(8, 4, max_length=32), list(range(10))
    assert cache.allocate(tokens) == (0, 0)
    grow(cache, [0], [10])
    assert cache.allocate(tokens) == (1, 0)  # nothing is known before it is there
    cache.remember(0, tokens)
    assert cache.allocate(tokens) == (2, 8)
    assert cache.allocate(tokens[:8]) == (3, 4)  # the last token's query is to be computed
    assert cache.allocate([0, 1, 2, 3, 9, 9, 9, 9, 9]).cached == 4
    assert cache.allocate([5, *tokens]).cached == 0
    assert cache.pages_used == 3
    for slot in range(6):
        cache.free(slot)
    assert cache.pages_used == 0 and cache.pages_free == 8
    assert cache.allocate(tokens).cached == 8  # known after nobody has it
    cache.check()


def test_a_known_page_is_not_written_to() -> None:
    """A request that is cut inside of it and grows again copies it first, though nobody else has it."""
    cache = make(8, 4, max_length=32)
    cache.allocate()
    ((k, v),) = grow(cache, [0], [9])
    cache.remember(0, range(8))
    cache.truncate(0, 6)
    ((new_k, new_v),) = grow(cache, [0], [2])
    assert_holds(cache.view([0]), 0, torch.cat([k[:6], new_k]), torch.cat([v[:6], new_v]))
    assert cache.allocate(range(9)) == (1, 8)
    assert_holds(cache.view([1]), 0, k[:8], v[:8])
    cache.check()


def test_prefixes_that_nobody_has_make_room_the_oldest_first() -> None:
    cache = make(4, 4, max_length=16)
    for first in (0, 50):
        slot = cache.allocate().slot
        grow(cache, [slot], [8])
        cache.remember(slot, range(first, first + 8))
        cache.free(slot)
    slot = cache.allocate(range(9)).slot  # used again, so the other one is older
    cache.free(slot)
    slot = cache.allocate().slot
    grow(cache, [slot], [4])
    assert cache.allocate(range(9)).cached == 8
    assert cache.allocate(range(50, 59)).cached == 4  # its end was forgotten
    cache.check()


# ---------------------------------------------------------------- forms
@on_devices
def test_csr_is_the_same(device) -> None:
    cache = make(device=device, layout="NHD")
    slots = [cache.allocate().slot for _ in range(4)]
    grow(cache, slots, [37, 0, 64, 5])
    indptr, indices, last = cache.csr(slots)
    assert indptr.tolist() == [0, 3, 3, 7, 8] and last.tolist() == [5, 0, 16, 5] and len(indices) == 8
    view = cache.view(slots)
    csr = PagedKV.from_csr(view.k_pages, view.v_pages, indptr, indices, last, max_length=64)
    q = torch.randn(4, 4, 1, DIMS[0], device=device)
    assert torch.equal(paged_attention(q, view), paged_attention(q, csr))


def test_a_view_copies_nothing_and_is_as_long_as_its_requests() -> None:
    cache = make(max_length=250)
    slots = [cache.allocate().slot for _ in range(2)]
    grow(cache, slots, [37, 250])
    view = cache.view(slots[:1])
    assert view.max_length == 48 and cache.view(slots).max_length == 250
    assert view.k_pages.data_ptr() == cache._k.data_ptr()
    assert view.page_indices.data_ptr() == cache._table.table.data_ptr()
    assert cache.view(torch.tensor(slots)).max_length == 250
    assert cache.view([]).batch == 0


@on_devices
def test_steps_of_a_batch_and_drafts(device) -> None:
    """A batch of 4 drafts of each request, of which some are dropped, as a [batch, heads, n, dim] tensor."""
    cache = make(device=device)
    slots = [cache.allocate().slot for _ in range(3)]
    grow(cache, slots, [15, 16, 17])
    before = cache.view(slots).gathered(torch.float32)[0]
    cache.reserve(slots, [4] * 3)
    k, v = (torch.randn(3, HEADS, 4, dim, device=device) for dim in DIMS)
    cache.append(0, slots, k, v)
    for b, (slot, kept) in enumerate(zip(slots, (0, 2, 4))):
        cache.truncate(slot, 15 + b + kept)
        found = cache.view([slot]).gathered(torch.float32)[0][0]
        assert torch.equal(found[:, : 15 + b], before[b, :, : 15 + b])
        assert torch.equal(found[:, 15 + b : 15 + b + kept], k[b, :, :kept])
    cache.check()


@on_devices
def test_made_in_inference_mode_and_used_outside(device) -> None:
    with torch.inference_mode():
        cache = make(device=device)
        slot = cache.allocate().slot
        grow(cache, [slot], [3])
    grow(cache, [slot], [3])
    with torch.inference_mode():
        grow(cache, [slot], [3])
        cache.view([slot])
    assert paged_attention(torch.zeros(1, 2, 1, DIMS[0], device=device), cache.view([slot])).isfinite().all()


def test_nothing_at_all() -> None:
    """No request, and no token of one."""
    cache = make()
    cache.reserve([], [])
    cache.append(0, [], torch.zeros(0, HEADS, DIMS[0]), torch.zeros(0, HEADS, DIMS[1]), [])
    slot = cache.allocate([]).slot
    cache.reserve([slot], [0])
    cache.append(0, [slot], torch.zeros(1, HEADS, 0, DIMS[0]), torch.zeros(1, HEADS, 0, DIMS[1]))
    assert (paged_attention(torch.ones(1, 2, 1, DIMS[0]), cache.view([slot])) == 0).all()
    assert [x.tolist() for x in cache.csr([slot])] == [[0, 0], [], [0]]
    cache.check()


# ---------------------------------------------------------------- errors
def test_running_out_of_pages_loses_nothing() -> None:
    cache = make(4, 16, max_requests=2)
    slots = [cache.allocate().slot for _ in range(2)]
    ((k, v),) = grow(cache, slots, [20, 17])
    with pytest.raises(OutOfPagesError) as caught:
        cache.reserve(slots, [1, 16])
    assert_explains(caught.value, "1 needed", "0 of 4 free")
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(OutOfPagesError) as caught:
        cache.allocate()
    assert_explains(caught.value, "2 requests")
    with pytest.raises(OutOfPagesError):
        cache.fork(0)
    cache.check()
    assert [cache.length(s) for s in slots] == [20, 17]
    assert_holds(cache.view(slots), 0, k[:20], v[:20])
    cache.append(0, slots, k, v, [20, 17])  # still what was last reserved


BROKEN = {
    "references": lambda t: t._references.update([0]),
    "free": lambda t: t._free.append(t._free[0]),
    "slots": lambda t: t._free_slots.append(0),
    "lengths on the device": lambda t: t.lengths.add_(1),
    "table of slot 0": lambda t: t.table.add_(1),
    "pages of slot 0": lambda t: (t._length.update({0: 1}), t.lengths.copy_(torch.tensor([1, 0]))),
    "reserved more": lambda t: t._fresh.update({0: 99}),
    "no request has": lambda t: t._known.idle.update({0: None}),
    "prefix tree": lambda t: t._known._page.clear(),
    "in front of page 0": lambda t: t._pages[0].reverse() or t.table[0, :2].copy_(t.table[0, :2].flip(0)),
}


@pytest.mark.parametrize("word", BROKEN)
def test_check_names_what_is_wrong(word) -> None:
    cache = make(6, 4, max_requests=2, max_length=16)
    slot = cache.allocate().slot
    grow(cache, [slot], [8])
    cache.remember(slot, range(8))
    cache.check()
    BROKEN[word](cache._table)
    with pytest.raises(PageTableError) as caught:
        cache.check()
    assert_explains(caught.value, word)


@pytest.mark.parametrize(
    "facts, error, word",
    [
        ({"page_size": 0}, OptionError, "page_size"), ({"num_pages": 1.5}, OptionError, "num_pages"),
        ({"max_requests": 0}, OptionError, "max_requests"), ({"dtype": torch.float64}, DTypeError, "float64"),
        ({"layout": "HDN"}, OptionError, "layout"), ({"v_dim": 64, "v_in_k": True}, ShapeError, "qk_dim"),
        ({"shared_layers": {0: 1}}, OptionError, "shared_layers"), ({"layers": 3, "shared_layers": {2: 1, 1: 0}}, OptionError, "2: 1"),
        ({"k_scale": torch.ones(3)}, ShapeError, "k_scale"), ({"v_scale": torch.ones(2, 2)}, ShapeError, "v_scale"),
    ],
)  # fmt: skip
def test_errors_of_the_cache(facts, error, word) -> None:
    with pytest.raises(error) as caught:
        make(**facts)
    assert_explains(caught.value, word)


ASK = {
    "slot not allocated": (lambda c, k, v: c.free(5), OptionError, "slot"),
    "slot twice": (lambda c, k, v: c.reserve([0, 0], [1, 1]), CallError, "different slots"),
    "count missing": (lambda c, k, v: c.reserve([0], [1, 1]), CallError, "count for each"),
    "negative": (lambda c, k, v: c.reserve([0], [-1]), ShapeError, "-1"),
    "too long": (lambda c, k, v: c.reserve([0], [300]), ShapeError, "256"),
    "truncate further": (lambda c, k, v: c.truncate(0, 6), ShapeError, "0 to the 5"),
    "remember more": (lambda c, k, v: c.remember(0, range(6)), ShapeError, "5 tokens"),
    "no such layer": (lambda c, k, v: c.append(1, [0], k, v), OptionError, "layer"),
    "view of no layer": (lambda c, k, v: c.view([0], -1), OptionError, "layer"),
    "view of no slot": (lambda c, k, v: c.view([3]), OptionError, "slot"),
    "not reserved": (lambda c, k, v: c.append(0, [0], k[:, :, :4], v[:, :, :4]), ShapeError, "last reserved"),
    "other heads": (lambda c, k, v: c.append(0, [0], k[:, :1], v[:, :1]), ShapeError, "k must be"),
    "other dim": (lambda c, k, v: c.append(0, [0], k, k), ShapeError, "v must be"),
    "ragged without counts": (lambda c, k, v: c.append(0, [0], k[0], v[0]), ShapeError, "counts"),
    "counts of others": (lambda c, k, v: c.append(0, [0], k[0, :, :3].transpose(0, 1), v, [5]), ShapeError, "5 tokens"),
    "batch of others": (lambda c, k, v: c.append(0, torch.tensor([0, 1]), k, v), ShapeError, "one entry a slot"),
    "k and v differ": (lambda c, k, v: c.append(0, [0], k, v[:, :, :4]), ShapeError, "same tokens"),
    "no values": (lambda c, k, v: c.append(0, [0], k), CallError, "values"),
    "no tensor": (lambda c, k, v: c.append(0, [0], [k], v), CallError, "list"),
    "float64": (lambda c, k, v: c.append(0, [0], k.double(), v), DTypeError, "float64"),
    "elsewhere": (lambda c, k, v: c.append(0, [0], k.to("meta"), v), DeviceError, "meta"),
    "slots of floats": (lambda c, k, v: c.view(torch.zeros(1)), DeviceError, "float32"),
    "gradient": (lambda c, k, v: c.append(0, [0], k.requires_grad_(), v), UnsupportedError, "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("what", ASK)
def test_errors_of_calls(what) -> None:
    """Each names what is wrong, and changes nothing."""
    call, error, word = ASK[what]
    cache = make(max_requests=2)
    cache.reserve([cache.allocate().slot], [5])
    with pytest.raises(error) as caught:
        call(cache, *(torch.randn(1, HEADS, 5, dim) for dim in DIMS))
    assert_explains(caught.value, word)
    cache.check()
    assert cache.length(0) == 5


def test_other_tokens_for_known_pages() -> None:
    cache = make(8, 4)
    grow(cache, [cache.allocate().slot], [8])
    cache.remember(0, range(4))
    with pytest.raises(CallError) as caught:
        cache.remember(0, range(1, 9))
    assert_explains(caught.value, "known already", "page 0")


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *FP8])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_kernel_writes_what_the_cpu_writes(dtype, given, layout) -> None:
    """Bit for bit, infinities and numbers between two of the pages' type among them; a NaN where one is."""
    pools = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        cache = make(100, 24, dtype=dtype, layout=layout, device=device, k_scale=0.7, v_scale=torch.tensor([0.3, 11.0]))
        slots = [cache.allocate().slot for _ in range(3)]
        for counts in ([1, 200, 33], [1, 1, 1], [9, 0, 70]):
            cache.reserve(slots, counts)
            k, v = (torch.randn(sum(counts), HEADS, dim).mul(3).exp().to(given) for dim in DIMS)
            k.view(-1)[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
            cache.append(0, slots, k.to(device), (-v).to(device), counts)
        pools.append([x.cpu() for x in cache.view(slots).gathered(torch.float32)])
    for a, b in zip(*pools):
        assert torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    cache = make(device="cuda", layers=2)
    slots = [cache.allocate(range(20)).slot for _ in range(2)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            grow(cache, slots, [20, 3], layers=(0, 1))
            cache.view(slots, 1), cache.csr(slots)
        other = cache.fork(slots[0])
        grow(cache, [slots[0], other], [1, 1])
        cache.remember(other, range(16)), cache.truncate(other, 3), cache.free(other)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.check()


@pytest.mark.gpu
def test_a_graph_of_a_step_is_replayed_for_other_slots_and_lengths() -> None:
    cache = make(device="cuda")
    first = [cache.allocate().slot for _ in range(4)]
    grow(cache, first, [17, 40, 3, 63])
    slots = torch.tensor(first[:2], device="cuda")
    k, v = (torch.randn(2, HEADS, 1, dim, device="cuda") for dim in DIMS)
    q = torch.randn(2, 4, 1, DIMS[0], device="cuda")

    def step() -> torch.Tensor:
        cache.append(0, slots, k, v)
        return paged_attention(q, cache.view(slots))

    cache.reserve(first[:2], [1, 1])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
        with pytest.raises(CallError):
            cache.view(first)
    for pair in ([0, 1], [3, 2], [2, 0]):
        slots.copy_(torch.tensor(pair))
        cache.reserve(pair, [1, 1])
        k.normal_()
        graph.replay()
        view = cache.view(pair)
        keys = view.gathered(torch.float32)[0]
        for b, slot in enumerate(pair):
            assert torch.equal(keys[b, :, cache.length(slot) - 1], k[b, :, 0])
        assert torch.allclose(out, paged_attention(q, view), atol=1e-5)


@pytest.mark.gpu
def test_a_pool_of_more_than_2_to_the_31_elements() -> None:
    cache = PagedKVCache(
        131_080,
        16,
        kv_heads=8,
        qk_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        max_requests=1,
        max_length=64,
        v_in_k=True,
    )
    cache._table._free.reverse()  # the last pages first
    cache.allocate()
    cache.reserve([0], [20])
    k = torch.randn(1, 8, 20, 128, device="cuda", dtype=torch.bfloat16)
    cache.append(0, [0], k)
    assert torch.equal(cache.view([0]).gathered(torch.bfloat16)[0][:, :, :20], k)


def test_the_names_are_public() -> None:
    assert flexattn.PagedKVCache is PagedKVCache
