"""Ranked documents with their windows shaded, as HTML."""

import re
from html.parser import HTMLParser

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyterrier_longdoc as ld
from pyterrier_longdoc.analysis.show import STRONGEST

from ..support import systems, tiny

TEXT = (
    "zero one two three four five six seven"  # windows: 0-13, 9-23 (they overlap), 28-38; "four" and what follows not
)


def ranking(**changes):
    row = {"qid": "q1", "query": "what <is> it", "docno": "d1", "score": 2.0, "rank": 0, "text": TEXT}
    row |= {
        "window_spans": [(0, 12), (9, 18), (24, 33)],
        "window_scores": [-1.0, 3.0, 1.0],
        "window_weights": [0.2, 0.5, 0.3],
    }
    return pd.DataFrame([row | changes])


class Page(HTMLParser):
    """The documents' text as a reader sees it: each piece with its opacity and whether it is underlined."""

    VOID = ("br",)

    def __init__(self, html):
        super().__init__()
        self.open, self.pieces, self.tags = [], [], set()
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        names = [tag for tag, _ in self.open]
        in_text = any(attributes.get("class") == "text" for _, attributes in self.open)
        if not in_text or names[-1] == "summary":
            return
        shade = re.search(r"rgba\(0,114,178,([\d.]+)\)", self.open[-1][1].get("style", ""))
        self.pieces.append((data, float(shade[1]) if shade else None, "u" in names))


def page(shown):
    return Page(shown._repr_html_())


def test_text_has_the_shade_of_its_highest_window_and_the_best_one_is_underlined():
    # Scores -1, 3, 1 are no shade, the strongest, and half of it; characters 9 to 12 are in the first two windows.
    assert [piece for piece in page(ld.show(ranking())).pieces if piece[0] in TEXT] == [
        (TEXT[:9], 0.0, False),
        (TEXT[9:12], STRONGEST, True),
        (TEXT[12:18], STRONGEST, True),
        (TEXT[18:24], None, False),
        (TEXT[24:33], STRONGEST / 2, False),
        (TEXT[33:], None, False),
    ]


def test_a_ranking_is_saved_as_a_page(tmp_path):
    shown = ld.show(ranking())
    shown.save(tmp_path / "ranking.html")
    saved = (tmp_path / "ranking.html").read_text(encoding="utf-8")
    assert saved.startswith("<!doctype html>")
    assert saved.endswith(shown._repr_html_())


def test_weights_shade_within_a_document():
    shades = [shade for _, shade, _ in page(ld.show(ranking(), by="weight")).pieces if shade is not None]
    assert shades == pytest.approx([STRONGEST * 0.4, STRONGEST, STRONGEST, STRONGEST * 0.6], abs=1e-3)


def test_scores_weights_and_shares_are_printed_too():
    html = ld.show(ranking())._repr_html_()
    assert re.search(r"<b>.*2: 3\.000.*0\.500</b>", html)  # score and weight of the best
    assert "11 of 38 characters" in html


def test_html_of_a_text_is_escaped_and_nothing_is_fetched():
    evil = "<script>alert(1)</script><img src=x> & 'q' \""
    html = ld.show(
        ranking(text=evil, docno="<i>d</i>", query="<u>", window_spans=[(0, 9), (9, 18), (20, 30)])
    )._repr_html_()
    assert Page(html).tags <= {"div", "style", "b", "p", "details", "summary", "span", "i", "u", "br"}
    assert "<script" not in html
    assert "<img" not in html
    assert not re.search(r"https?:|url\(|@import|on\w+=", html)
    assert not re.search(r"(?<!-)color:(?! inherit)", html)  # all but the shade is the page's own colour


def test_a_long_text_is_collapsed_but_complete():
    spans = [(0, 400), (400, 500), (900, 1000)]
    text = "".join(chr(97 + i % 26) for i in range(1000))
    shown = ld.show(ranking(text=text, window_spans=spans), characters=150)
    assert "".join(data for data, _, _ in page(shown).pieces) == text
    html = shown._repr_html_()
    assert "… 250 more characters" in html  # of the first window
    assert "… 250 more characters" in html.partition("not read<br>")[2]  # of the 400 that were not read, 150 are seen


@given(st.text(max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=4))
def test_the_whole_text_is_shown_whatever_the_windows(text, ends):
    spans = sorted((min(a, b, len(text)), min(max(a, b), len(text))) for a, b in ends)
    shown = ld.show(ranking(text=text, window_spans=spans, window_scores=[1.0] * len(spans), window_weights=None))
    seen = "".join(data for data, _, _ in page(shown).pieces)
    plain = text.encode("utf-8", "replace").decode()
    assert re.sub(r"\s", "", seen) == re.sub(r"\s", "", plain)


def test_a_ranking_is_printed_as_one_line_outside_notebooks():
    (line,) = repr(ld.show(pd.concat([ranking(), ranking(docno="d2", rank=1)]))).splitlines()
    assert "what <is> it" in line
    assert "2 documents" in line


def test_a_document_without_windows_is_shown_as_unread():
    unread = ranking(docno="d2", rank=1, window_spans=[], window_scores=[], window_weights=[])
    shown = ld.show(pd.concat([ranking(), unread]))
    assert "no windows" in shown._repr_html_().rpartition("d2")[2]
    assert (TEXT, None, False) in page(shown).pieces


def test_queries_are_found_by_qid_or_text():
    both = pd.concat([ranking(), ranking(qid=2, query="other", docno="d9")], ignore_index=True)
    assert [ld.show(both, query).documents[0].docno for query in ("2", "other")] == ["d9", "d9"]


@pytest.mark.parametrize(("query", "found"), [(None, 3), ("third", 0), ("other", 2)])
def test_a_query_that_is_not_one_qid_is_refused(query, found):
    results = pd.concat([ranking(), *(ranking(qid=qid, query="other") for qid in ("2", "3"))])
    with pytest.raises(ValueError, match=f"{found} qids"):
        ld.show(results, query)


@pytest.mark.parametrize(
    ("results", "options", "name"),
    [
        (ranking().drop(columns="window_spans"), {}, "window_spans"),
        (ranking().drop(columns="window_weights"), {"by": "weight"}, "window_weights"),
        (ranking(), {"text_field": "body"}, "body"),
        (ranking(title="zero one"), {"text_field": "title"}, "end at character 33"),
        (ranking(), {"documents": 0}, "documents"),
    ],
)
def test_missing_columns_and_wrong_arguments_are_refused_by_name(results, options, name):
    with pytest.raises(ValueError, match=name):
        ld.show(results, **options)


@pytest.mark.parametrize("columns", [{"rank": ["10", "9"]}, {"score": [1.0, 2.0]}], ids=str)
def test_documents_are_shown_by_rank_or_else_by_score_with_their_labels(columns):
    several = pd.concat([ranking(), ranking(docno="d2", label="1")]).drop(columns="rank").assign(**columns)
    assert [(each.docno, each.label) for each in ld.show(several).documents] == [("d2", 1.0), ("d1", None)]


@pytest.mark.parametrize("name", ["MaxP", "PARADE-attn", "BiEncoder-max"])
def test_results_of_models_are_shown_with_their_best_window(name):
    cls, options = systems.SYSTEMS[name]
    results = tiny.results()
    frame = cls(tiny.encoder(), explain=True, **options)(results)
    shown = ld.show(frame, str(frame["qid"].iloc[0]), documents=20)
    of_query = frame[frame["qid"] == frame["qid"].iloc[0]]
    assert [document.docno for document in shown.documents] == of_query.sort_values("rank")["docno"].tolist()
    for document, row in zip(shown.documents, of_query.sort_values("rank").to_dict("records"), strict=True):
        assert document.spans[document.best] == (row["best_start"], row["best_end"])
    assert page(shown).pieces
