"""How shares are written."""

from __future__ import annotations

from pyterrier_longdoc.common.coverage import Coverage
from pyterrier_longdoc.common.presentation import percent


def test_no_share_is_all_or_nothing_unless_it_is():
    nearly = Coverage(documents=1, tokens=200_003, tokens_read=199_907)
    assert "199907 of 200003 tokens read (>99.9%)" in str(nearly)
    assert "96 of 200003 tokens of documents (<0.1%), cut by" in nearly.losses("max_doc_len=1")
    assert "(100.0%)" in str(Coverage(tokens=3, tokens_read=3))
    assert [percent(share, 0) for share in (1, 0.996, 0.5, 0.004, 0)] == ["100%", ">99%", "50%", "<1%", "0%"]
