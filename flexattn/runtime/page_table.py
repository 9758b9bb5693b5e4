"""Which pages a request has: free pages, reference counts, a table and lengths on the device, and prefixes that are known.

Reads numbers of tokens and token ids; makes page numbers. The idea: the host knows everything and the device is only told, one
transfer an operation, so nothing ever waits for the device. Every operation looks first and then acts: one that fails changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CallError, OptionError, OutOfPagesError, PageTableError, ShapeError

Copy = tuple[int, int]  # from page, to page


class PageTable:
    """Pages of some requests, each of which has a slot. Host bookkeeping, of which `table` and `lengths` are the device's copy.

    Args:
        num_pages: pages of the pool.
        page_size: tokens of a page.
        max_requests: slots.
        max_length: tokens of a request at most.
        device: of table and lengths.

    Attributes:
        table: int32 [max_requests, pages of a request at most]; entries behind a request's pages are of the past.
        lengths: int32 [max_requests], tokens; 0 of a slot that nobody has.
        version: grows whenever table or lengths change.

    Example:
        >>> pages = PageTable(4, 16, 2, 48, torch.device("cpu"))
        >>> slot = pages.allocate()[0]
        >>> pages.reserve([slot], [20]), pages.pages_of(slot), pages.lengths.tolist()
        ([], (0, 1), [20, 0])

    Source: Kwon et al., PagedAttention (2023), arXiv:2309.06180; Zheng et al., SGLang (2024), arXiv:2312.07104 (RadixAttention).
    """

    def __init__(
        self, num_pages: int, page_size: int, max_requests: int, max_length: int, device: torch.device
    ) -> None:
        self.num_pages, self.page_size, self.max_length = num_pages, page_size, max_length
        width = -(-max_length // page_size)
        self._state = torch.zeros(max_requests * (width + 1), dtype=torch.int32, device=device)
        self.table = self._state[: max_requests * width].view(max_requests, width)
        self.lengths = self._state[max_requests * width :]
        self.version = 0
        self._free_slots, self._free = list(range(max_requests))[::-1], list(range(num_pages))[::-1]
        self._pages: dict[int, list[int]] = {}  # of each slot in use
        self._length: dict[int, int] = {}
        self._fresh: dict[int, int] = {}  # tokens last reserved, which nobody else can see yet
        self._references: Counter[int] = Counter()  # slots that have a page
        self._known = _Prefixes()

    # ---------------------------------------------------------------- what there is
    @property
    def pages_free(self) -> int:
        """Pages that can be had: those that nobody has, and those of known prefixes that no request has."""
        return len(self._free) + len(self._known.idle)

    def pages_of(self, slot: int) -> tuple[int, ...]:
        """The page numbers of a request."""
        self._must_exist(slot)
        return tuple(self._pages[slot])

    def length(self, slot: int) -> int:
        """The tokens of a request."""
        self._must_exist(slot)
        return self._length[slot]

    def fresh(self, slot: int) -> int:
        """The tokens last reserved of a request, which alone may be written."""
        self._must_exist(slot)
        return self._fresh[slot]

    # ---------------------------------------------------------------- operations
    def allocate(self, tokens: Sequence[int] = ()) -> tuple[int, int]:
        """A slot, with the whole pages of the longest known prefix of all tokens but the last; and how many tokens those are."""
        slot = self._next_slot()
        pages = self._known.longest(_chunks(tokens, max(len(tokens) - 1, 0), self.page_size))
        self._open(slot, pages, len(pages) * self.page_size)
        return slot, len(pages) * self.page_size

    def fork(self, slot: int) -> int:
        """A slot with the same pages, whose last one the next of the two that writes to it copies."""
        self._must_exist(slot)
        new = self._next_slot()
        self._fresh[slot] = 0
        self._open(new, self._pages[slot], self._length[slot])
        return new

    def reserve(self, slots: Sequence[int], counts: Sequence[int]) -> list[Copy]:
        """Makes each request longer, and says which pages must be copied before they are written to."""
        shared = self._plan(slots, counts)
        needed = [-(-(self._length[s] + n) // self.page_size) - len(self._pages[s]) for s, n in zip(slots, counts)]
        taken = iter(self._take(len(shared) + sum(needed)))
        copies, told = [], {}
        for slot in shared:
            pages = self._pages[slot]
            copies.append((pages[-1], next(taken)))
            self._release(pages[-1:])
            pages[-1] = copies[-1][1]
            told[self._place(slot, len(pages) - 1)] = pages[-1]
        for slot, more, n in zip(slots, needed, counts):
            pages = self._pages[slot]
            for page in (next(taken) for _ in range(more)):
                told[self._place(slot, len(pages))] = page
                pages.append(page)
            self._length[slot] += n
            self._fresh[slot] = n
            told[self._length_place(slot)] = self._length[slot]
        self._tell(told)
        return copies

    def truncate(self, slot: int, length: int) -> None:
        """Drops the tokens of a request from position `length` on, and the pages that only they were in."""
        old = self.length(slot)
        if not 0 <= length <= old:
            hint = "reserve, to make a request longer"
            raise ShapeError(f"length must be from 0 to the {old} tokens of slot {slot}", given=length, hint=hint)
        kept = -(-length // self.page_size)
        self._release(self._pages[slot][kept:])
        del self._pages[slot][kept:]
        self._length[slot] = length
        self._fresh[slot] = max(0, self._fresh[slot] - (old - length))
        self._tell({self._length_place(slot): length})

    def free(self, slot: int) -> None:
        """Gives a slot back, and its pages as far as nobody else has them; those of a known prefix stay until they are needed."""
        self._must_exist(slot)
        self._release(self._pages.pop(slot))
        del self._length[slot], self._fresh[slot]
        self._free_slots.append(slot)
        self._tell({self._length_place(slot): 0})

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Makes the whole pages of a request a known prefix; `tokens` are the ids of its first tokens."""
        length = self.length(slot)
        if len(tokens) > length:
            raise ShapeError(
                f"slot {slot} has {length} tokens", given=f"{len(tokens)} token ids", hint="reserve and append first"
            )
        self._known.add(self._pages[slot], _chunks(tokens, len(tokens), self.page_size))
        self._fresh[slot] = 0

    def check(self) -> None:
        """Compares every record with every other, also with those on the device, for which it waits.

        Raises:
            PageTableError: names the first that is wrong.
        """
        held = Counter(page for pages in self._pages.values() for page in pages)
        _same("references of pages", +self._references, held)
        known = self._known.pages
        _same("known pages that no request has", set(self._known.idle), known - held.keys())
        everywhere = sorted([*self._free, *(held.keys() | known)])
        _same("pages that are free, in use or known", everywhere, list(range(self.num_pages)))
        _same("slots", sorted([*self._free_slots, *self._pages]), list(range(self.table.shape[0])))
        self._known.check()
        table, lengths = self.table.tolist(), self.lengths.tolist()
        _same("lengths on the device", lengths, [self._length.get(s, 0) for s in range(len(lengths))])
        for slot, pages in self._pages.items():
            _same(f"pages of slot {slot}", len(pages), -(-self._length[slot] // self.page_size))
            _same(f"table of slot {slot} on the device", table[slot][: len(pages)], pages)
            _same(f"whether slot {slot} reserved more than it has", self._fresh[slot] > self._length[slot], False)
            self._known.check_request(slot, pages)

    # ---------------------------------------------------------------- parts of them
    def _must_exist(self, slot: int) -> None:
        if slot not in self._pages:
            raise OptionError(
                "a slot must be one that allocate or fork gave and free did not take", given=slot,
                hint=f"one of {sorted(self._pages)}",
            )  # fmt: skip

    def _next_slot(self) -> int:
        if not self._free_slots:
            given, hint = f"{len(self._pages)} requests", "free one, or a larger max_requests"
            raise OutOfPagesError("every slot has a request", given=given, hint=hint)
        return self._free_slots[-1]

    def _open(self, slot: int, pages: Sequence[int], length: int) -> None:
        """Gives the next slot to a request with pages of others."""
        self._free_slots.pop()
        self._pages[slot], self._length[slot], self._fresh[slot] = list(pages), length, 0
        self._references.update(pages)
        for page in pages:
            self._known.idle.pop(page, None)
        told = {self._place(slot, at): page for at, page in enumerate(pages)}
        self._tell({**told, self._length_place(slot): length})

    def _plan(self, slots: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Checks what is to be reserved, and finds the slots whose last page must be copied since others have it."""
        if len(slots) != len(counts) or len(set(slots)) != len(slots):
            raise CallError(
                "reserve needs different slots and a count for each", given=f"{list(slots)} and {list(counts)}",
                hint="one entry a request",
            )  # fmt: skip
        others, shared = Counter[int](), []
        for slot, n in zip(slots, counts):
            length = self.length(slot)
            if n < 0 or length + n > self.max_length:
                given, hint = f"{length} and {n} more of slot {slot}", "truncate to drop tokens, or a larger max_length"
                raise ShapeError(f"a request has at most {self.max_length} tokens", given=given, hint=hint)
            if n > 0 and length % self.page_size:
                last = self._pages[slot][-1]
                if last in self._known.pages or self._references[last] - others[last] > 1:
                    others[last] += 1
                    shared.append(slot)
        return shared

    def _take(self, count: int) -> list[int]:
        """Pages for a request: those that nobody has, then those of known prefixes, the least recently used first."""
        if count > self.pages_free:
            given = f"{count} needed, {self.pages_free} of {self.num_pages} free"
            raise OutOfPagesError("the cache has too few pages", given=given, hint="free or truncate a request first")
        taken = [self._free.pop() if self._free else self._known.forget_oldest() for _ in range(count)]
        self._references.update(taken)
        return taken

    def _release(self, pages: Sequence[int]) -> None:
        """One reference less for each page; the last one first, so that of a prefix its end is forgotten before its beginning."""
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                if page in self._known.pages:
                    self._known.idle[page] = None
                else:
                    self._free.append(page)

    def _place(self, slot: int, at: int) -> int:
        return slot * self.table.shape[1] + at

    def _length_place(self, slot: int) -> int:
        return self.table.numel() + slot

    def _tell(self, told: dict[int, int]) -> None:
        """Writes numbers to places of the device's copy."""
        if not told:
            return
        self.version += 1
        places, values = to_device([told.keys(), told.values()], torch.int64, self._state.device)
        self._state.index_copy_(0, places, values.int())


# ---------------------------------------------------------------- known prefixes
class _Key(NamedTuple):
    """What a known page holds: some tokens behind all those of another page, or (-1) at the beginning."""

    parent: int
    tokens: tuple[int, ...]


class _Prefixes:
    """A radix tree of token ids, a page an edge: it says which page continues a page with certain tokens.

    Who has a page of the tree has all those in front of it. So a page is idle, which no request has, only if all behind it are, and
    those became so before it: the oldest of `idle` has none behind it.
    """

    def __init__(self) -> None:
        self.idle: OrderedDict[int, None] = OrderedDict()
        self._key: dict[int, _Key] = {}
        self._page: dict[_Key, int] = {}

    @property
    def pages(self) -> set[int] | dict[int, _Key]:
        """All pages of the tree."""
        return self._key

    def longest(self, chunks: Iterable[tuple[int, ...]]) -> list[int]:
        """The pages of the longest prefix that is known."""
        found: list[int] = []
        for chunk in chunks:
            page = self._page.get(_Key(found[-1] if found else -1, chunk))
            if page is None:
                break
            found.append(page)
        return found

    def add(self, pages: Sequence[int], chunks: Iterable[tuple[int, ...]]) -> None:
        """Makes pages known, up to one whose tokens another page is known for."""
        parent = -1
        for at, (page, chunk) in enumerate(zip(pages, chunks)):
            key = _Key(parent, chunk)
            if self._key.get(page, key) != key:
                given, hint = f"other token ids for page {at} of the request", "the ids that its keys were made from"
                raise CallError("a request's tokens are known already", given=given, hint=hint)
            if self._page.setdefault(key, page) != page:
                return
            self._key[page] = key
            parent = page

    def forget_oldest(self) -> int:
        """Takes the page out of the tree that was not used for the longest time."""
        page, _ = self.idle.popitem(last=False)
        del self._page[self._key.pop(page)]
        return page

    def check(self) -> None:
        """That the tree is one."""
        _same("pages of the prefix tree", {key: page for page, key in self._key.items()}, self._page)
        _same("parents of the prefix tree", {k.parent for k in self._page} - self._key.keys() <= {-1}, True)

    def check_request(self, slot: int, pages: Sequence[int]) -> None:
        """That a request has what is in front of its known pages."""
        for at, page in enumerate(pages):
            if page in self._key:
                _same(
                    f"what is in front of page {at} of slot {slot}", pages[at - 1] if at else -1, self._key[page].parent
                )


def _chunks(tokens: Sequence[int], count: int, page_size: int) -> Iterable[tuple[int, ...]]:
    """The whole pages of the first `count` token ids."""
    return (tuple(tokens[at : at + page_size]) for at in range(0, count - page_size + 1, page_size))


def _same(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise PageTableError(
            f"{what} must be {wanted}", given=found, hint="reporting it: no sequence of calls may do this"
        )


def to_device(rows: Sequence[Iterable[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of numbers on a device, which nobody waits for."""
    made = torch.tensor([list(row) for row in rows], dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


__all__ = ["Copy", "PageTable", "to_device"]
