from typing import NamedTuple
from unittest.mock import Mock

import ir_datasets
import pandas as pd
import pyterrier as pt
import pytest
from ir_datasets.datasets.gov2 import Gov2Doc
from ir_datasets.formats.webarc import WarcDoc

from pyterrier_longdoc.data.html import DecodedDataset, decode_body, document_fields, html_to_text

META = b'<meta http-equiv="Content-Type" content="text/html; charset=utf-8">'
PAGE = "<html><head><title>Über&nbsp;uns</title></head><body><p>Grüße</p></body></html>"


class PlainDoc(NamedTuple):
    doc_id: str
    url: str
    body: str

    def default_text(self):
        return f"{self.url} {self.body}"


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ("é".encode("latin-1"), "HTTP/1.1 200 OK\nContent-Type: text/html; charset=iso-8859-1", "é"),
        ("é".encode(), "Content-Type: text/html", "é"),
        ("é".encode("latin-1"), "", "é"),
        ("“é”".encode("windows-1252"), "charset=nonsense-8", "“é”"),
        (b'<meta charset="shift_jis">' + "語".encode("shift_jis"), "", '<meta charset="shift_jis">語'),
        ("﻿é".encode(), "charset=latin-1", "é"),
        ("語".encode("utf-16"), "charset=latin-1", "語"),
        (b"a\xffb", "charset=utf-8", "a�b"),
        (b"x", "charset=idna", "x"),
        # What browsers take these names for.
        ("“é”".encode("windows-1252"), "charset=ISO-8859-1", "“é”"),
        ("é".encode(), "charset=us-ascii", "é"),
        (b'<meta charset="utf-16"><p>page', "", '<meta charset="utf-16"><p>page'),
        ("①".encode("cp932"), "charset=shift_jis", "①"),
        ("㊣".encode("gbk"), "charset=gb2312", "㊣"),
        (b"page \\u0041+AEE-", "charset=utf-7", "page \\u0041+AEE-"),
        (b"<?xml encoding='iso-8859-2'?>\xe8", "", "<?xml encoding='iso-8859-2'?>č"),
        # The header counts before the page.
        (META + "é".encode("latin-1"), "Content-Type: text/html; charset=latin-1", META.decode() + "é"),
        (META + "é".encode("latin-1"), "", META.decode() + "�"),
    ],
)
def test_bodies_are_decoded(body, headers, expected):
    assert decode_body(body, headers) == expected


@pytest.mark.parametrize(
    ("html", "title", "text"),
    [
        ("<p>one</p><p>two</p>", "", "one\ntwo"),
        ("a <b>b</b>old<br>line", "", "a bold\nline"),
        ("<table><tr><td>1</td><td>2</td></tr></table>", "", "1\n2"),
        ("<script>var x = '<p>no</p>';</script>yes<style>p {}</style>", "", "yes"),
        ("<title> A\n title </title><h1>Head</h1>", "A title", "Head"),
        ("x &amp; y &lt;z&gt; &#233;", "", "x & y <z> é"),
        ("<p>unclosed <b>tags<p>all over </i>", "", "unclosed tags\nall over"),
        ("<pre>two  spaces\nand lines</pre>", "", "two spaces and lines"),
        ("a<!-- no -->b", "", "ab"),
        ("nul\0l", "", "nul l"),
        ("co&shy;oper<wbr>ate &ZeroWidthSpace;<p>&shy;", "", "cooperate"),
        ("", "", ""),
    ],
)
def test_pages_become_text(html, title, text):
    assert html_to_text(html) == (title, text)


def test_documents_of_web_collections():
    gov = Gov2Doc("GX1", "http://a.b", "Content-Type: text/html; charset=latin-1", PAGE.encode("latin-1"), "text/html")
    fields = document_fields(gov)
    assert {name: fields[name] for name in ("docno", "title", "text", "url")} == {
        "docno": "GX1", "title": "Über uns", "text": "Grüße", "url": "http://a.b"
    }  # fmt: skip
    clueweb = WarcDoc(
        "cw1", "http://a.b", "2009", b"Content-Type: text/html; charset=utf-8", PAGE.encode(), "text/html"
    )
    assert document_fields(clueweb)["text"] == "Grüße"
    plain = gov._replace(body="1 < 2\n Grüße".encode(), body_content_type="text/plain", http_headers="")
    assert document_fields(plain)["text"] == "1 < 2\n Grüße"
    assert document_fields(PlainDoc("d", "u", "words")) == {
        "docno": "d", "url": "u", "body": "words", "title": "", "text": "u words"
    }  # fmt: skip


def fake_dataset(documents: dict) -> Mock:
    """As much of a dataset of ir_datasets as there is without its files."""
    answers = {"documentation": None, "docs_count": len(documents), "docs_cls": Gov2Doc, "has_docs": True}
    made = Mock(**{f"{name}.return_value": value for name, value in {**answers, "has_queries": False}.items()})
    made.docs_iter.side_effect = lambda: iter(documents.values())
    made.docs_store.return_value.get_many_iter.side_effect = lambda docnos: (
        documents[docno] for docno in reversed(docnos) if docno in documents
    )
    return made


@pytest.fixture
def dataset(monkeypatch):
    pages = [f"<title>T{i}</title><p>Text {i}".encode() for i in range(3)]
    documents = {f"d{i}": Gov2Doc(f"d{i}", "u", "", page, "text/html") for i, page in enumerate(pages)}
    monkeypatch.setattr(ir_datasets, "load", lambda name: fake_dataset(documents))
    return DecodedDataset("gov2")


def test_documents_are_decoded(dataset):
    corpus = dataset.get_corpus_iter(verbose=False)
    assert len(corpus) == 3
    assert [row["text"] for row in corpus] == ["Text 0", "Text 1", "Text 2"]
    assert list(dataset.documents) == ["d0", "d1", "d2"]
    assert dataset.documents["d1"]["text"] == "Text 1"
    assert [dataset._describe_component(name) for name in ("corpus", "topics", "index")] == [True, None, None]


def test_loader_reads_what_is_asked_for(dataset):
    inp = pd.DataFrame({"docno": ["d2", "d0", "d2"], "text": "stale"})
    out = dataset.text_loader("*")(inp)
    assert out["text"].tolist() == ["Text 2", "Text 0", "Text 2"]
    assert out["title"].tolist() == ["T2", "T0", "T2"]
    assert dataset.text_loader("url")(inp)["url"].tolist() == ["u"] * 3
    assert list(dataset.text_loader()(inp.iloc[:0]).columns) == ["docno", "text"]
    with pytest.raises(KeyError, match="'d9' is not in the collection 'gov2'"):
        dataset.text_loader()(pd.DataFrame({"docno": ["d1", "d9"]}))
    with pytest.raises(ValueError, match=r"'body'.*'text', 'title', 'url', 'http_h"):
        dataset.text_loader("body")


def test_topics_and_qrels_are_those_of_pyterrier(monkeypatch):
    plain = type(pt.get_dataset("irds:gov2/trec-tb-2004"))
    for method in ("get_topics", "get_qrels"):
        monkeypatch.setattr(plain, method, lambda self, variant: (self.irds_ref().dataset_id(), variant))
    dataset = DecodedDataset("gov2/trec-tb-2004")
    assert dataset.get_topics("title") == ("gov2/trec-tb-2004", "title")
    assert dataset.get_qrels() == ("gov2/trec-tb-2004", None)
    assert dataset.info_url() == "https://ir-datasets.com/gov2.html#gov2/trec-tb-2004"
