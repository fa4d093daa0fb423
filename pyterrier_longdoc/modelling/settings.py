"""What a scorer reads and how it computes: one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..common.coverage import LeftOut, Reading
from .layout import LAYOUTS, InputLayout
from .preselection import Preselection
from .windows import Windows

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings:
    """What is read of queries and texts, and how it is computed; the weights have no part in it.

    Attributes:
        windows: how texts are cut; checked against the backbone's longest input.
        max_doc_len: read only this many tokens of a text; None reads all.
        max_query_len: read only this many tokens of a query, 32 in Boytsov et al. 2025; None reads what fits.
        layout: how a query and a window become one input.
        preselect: which windows are read for a query; None reads all.
        repeat_tokens: most tokens of what is read with each window, next to its own; 0 where nothing is.
        batch_size: most windows in one pass through the backbone.
        max_batch_tokens: most tokens, padding included, in one pass; a longer window passes alone. None for what suits
            the device.
        device: where the weights are.
        dtype: precision of the encoder when it scores; heads always work in fp32.
        runtime: what computes the backbone when it scores, see `runtimes.py`.

    Raises:
        ValueError: if `preselect` cannot choose from the windows, or the layout is not for them.
    """

    windows: Windows
    max_doc_len: int | None = None
    max_query_len: int | None = 32
    layout: InputLayout = LAYOUTS["pair"]
    preselect: Preselection | None = None
    repeat_tokens: int = 0
    batch_size: int = 64
    max_batch_tokens: int | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    runtime: str = "torch"

    def __post_init__(self) -> None:
        if self.preselect is not None:
            self.preselect.check(self.windows)
        self.layout.check(self.windows, self.preselect, self.max_query_len, repeats=self.repeat_tokens > 0)

    @property
    def largest_window(self) -> int | None:
        """The most tokens of a window with what is read with it; None if only the backbone limits it."""
        largest = self.windows.largest
        return None if largest is None else largest + self.repeat_tokens

    def windows_within(self, room: int) -> Windows:
        """The windows, checked against the tokens that the backbone has for a window and what is read with it.

        Raises:
            ValueError: if that is too little.
        """
        if not self.repeat_tokens:
            return self.windows.within(room)
        kept = f"repeat_tokens={self.repeat_tokens} are kept for what is read with each window"
        if room <= self.repeat_tokens:
            raise ValueError(f"{kept}, and the backbone has {room} for both: lower repeat_tokens")
        try:
            return self.windows.within(room - self.repeat_tokens)
        except ValueError as error:
            raise ValueError(f"{error} ({kept}: lower that)") from None

    def sharing(self, together: int, alone: int) -> Settings:
        """The settings with all of a query that fits, for `max_query_len=None`.

        Windows of a given size have it, and queries have the rest; windows of no given size leave a quarter to queries.
        So the room is the same for all queries of a model, and no score depends on other queries.

        Args:
            together: most tokens of a query and a window.
            alone: most tokens of either.

        Raises:
            ValueError: if a window leaves no room for a query.
        """
        fitting = replace(self, windows=self.windows_within(min(alone, together - 1)))
        if fitting.windows != self.windows:  # of no given size
            fitting = replace(self, windows=self.windows_within(min(alone, together - together // 4)))
        return replace(fitting, max_query_len=min(alone, together - (fitting.largest_window or 0)))

    def within(self, longest: int | None, together: int | None, specials: int, alone: int | None = None) -> Settings:
        """The settings with queries and windows that fit.

        Args:
            longest: the longest input, for the error.
            together: most tokens of a query and a window; None if nothing limits them.
            specials: tokens of an input that are special, for the error.
            alone: most tokens of either; None if only `together` limits them.

        Raises:
            ValueError: if query, largest window and special tokens exceed the longest input.
        """
        if together is None:
            return self
        alone = together if alone is None else alone
        if self.max_query_len is None:
            return self.sharing(together, alone)
        room = min(alone, together - self.max_query_len)
        if room < 1 or self.max_query_len > alone:
            raise ValueError(
                f"max_query_len={self.max_query_len} leaves no room for a document: the backbone takes {longest} "
                f"tokens, {specials} of them special; lower max_query_len"
            )
        return replace(self, windows=self.windows_within(room))

    def left_out(self, reading: Reading) -> LeftOut:
        """Why not all of a text was read of which so much was."""
        within = reading.tokens if self.max_doc_len is None else min(reading.tokens, self.max_doc_len)
        beyond = reading.tokens - max(within, reading.tokens_read)
        if self.layout.shared_budget or (self.preselect is None and self.windows.max_windows is None):
            return LeftOut(beyond)
        offered = within if self.preselect is not None else self.windows.reach(within)
        return LeftOut(beyond, offered - reading.tokens_read)
