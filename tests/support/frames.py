"""Rows of frames as nobody would write them."""

from __future__ import annotations

from hypothesis import strategies as st

from . import tiny

_TEXTS = st.one_of(
    st.none(),
    st.just(""),
    st.text(max_size=60),
    st.text(alphabet="\x00\ud800\u200b\u0301\ufeff\U0001f44d 中a.\n\t", max_size=30),
    st.lists(st.sampled_from(tiny.WORDS), max_size=60).map(" ".join),
)
ROWS = st.fixed_dictionaries(
    {
        "qid": st.sampled_from(["1", "2"]),
        "query": _TEXTS,
        "docno": st.sampled_from(["a", "b", "c"]),
        "text": _TEXTS,
        "score": st.floats(-10, 10),
        "_x": st.none() | st.integers(),
        "title": _TEXTS,
    }
)
