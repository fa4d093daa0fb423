"""Web pages as text: documents of collections that are bytes (GOV2, ClueWeb09) are decoded and freed of HTML."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import pyterrier as pt

from ..common.citations import of_ir_datasets
from .collection import Collection, Documents, StreamedDocuments

_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_CHARSETS = {  # as browsers read them, by what pages contain, not by what they claim
    **{"iso8859-1": "windows-1252", "euc-kr": "cp949", "x-euc-jp": "euc-jp"},
    **dict.fromkeys(("shift-jis", "x-sjis", "windows-31j"), "cp932"),
    **dict.fromkeys(("gb2312", "gbk", "x-gbk"), "gb18030"),
}
_NO_CHARSETS = {"ascii", "idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7"}
_HIDDEN = {"script", "style", "noscript", "template"}
_INLINE = (  # noqa: SIM905 - shorter than a list of literals
    "a abbr acronym b bdi bdo big cite code del dfn em font i ins kbd label mark q s samp small span strike strong sub "
    "sup tt u var wbr"
).split()

_UNSEEN = dict.fromkeys(map(ord, "\u00ad\u200b\u2060\ufeff"))
"""Hints where a browser may break a line, or may not."""


def decode_body(body: bytes, http_headers: bytes | str = "") -> str:
    """Decode a web page.

    The encoding is that of the byte order mark, else of the HTTP header, else of an XML declaration or `<meta>`
    element. If Python knows none of these, it is UTF-8 if that fits the body, else Windows-1252. Names are read as
    browsers read them: ISO-8859-1 means Windows-1252, ASCII means nothing. Invalid bytes become replacement characters.

    Example:
        >>> decode_body("naïve".encode("latin-1"), "Content-Type: text/html; charset=ISO-8859-1")
        'naïve'
    """
    # Beautiful Soup's UnicodeDammit reads 62 % of the letters of pages in UTF-8 with one broken byte; this reads 97 %.
    from bs4.dammit import EncodingDetector

    headers = http_headers.decode("latin-1") if isinstance(http_headers, bytes) else http_headers or ""
    body, mark = EncodingDetector.strip_byte_order_mark(body)
    declaration = _charset(EncodingDetector.find_declared_encoding(body, is_html=True) or "")
    # A declaration that can be read byte by byte is not in UTF-16, even if it says so.
    page_charset = "" if declaration.startswith(("utf-16", "utf-32")) else declaration
    for encoding in filter(None, [mark, *map(_charset, _CHARSET.findall(headers)), page_charset]):
        try:
            return body.decode(encoding, errors="replace")
        except (LookupError, UnicodeError):  # no such encoding, or one that knows no replacement
            continue
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("windows-1252", errors="replace")


def _charset(name: str) -> str:
    """Return Python's name of a charset; "" if there is none."""
    try:
        codec = codecs.lookup(name).name
    except LookupError:
        codec = name.lower()
    codec = codec.replace("_", "-")
    return "" if codec in _NO_CHARSETS else _CHARSETS.get(codec, codec)


def html_to_text(html: str) -> tuple[str, str]:
    r"""Return title and text of a page, as a browser shows them, one line for each block.

    Example:
        >>> html_to_text("<title>A page</title><p>Two<b>fold</b> text</p><table><td>one<td>two</table>")
        ('A page', 'Twofold text\none\ntwo')
    """
    # Beautiful Soup's get_text takes five times as long, and takes a <b> within a word for a block.
    from lxml import etree

    page = _Page()
    parser = etree.HTMLParser(target=page, huge_tree=True)
    # lxml's parser survives any page; libxml2 would stop at a null.
    parser.feed(html.replace("\0", " ").encode("utf-8", "replace").decode())
    if html.strip():
        parser.close()
    return _lines(page.title).replace("\n", " "), _lines(page.text)


class _Page:
    """Collects title and text of a page from what lxml's parser reports."""

    def __init__(self) -> None:
        self.title, self.text = [""], [""]
        self._hidden = 0
        self._in_title = False

    def start(self, tag: Any, attributes: Any) -> None:
        self._hidden += tag in _HIDDEN
        self._in_title = self._in_title or tag == "title"
        if tag not in _INLINE:
            self.text.append("\n")

    def end(self, tag: Any) -> None:
        self._hidden -= tag in _HIDDEN
        self._in_title = self._in_title and tag != "title"
        if tag not in _INLINE:
            self.text.append("\n")

    def data(self, data: str) -> None:
        if not self._hidden:
            # A line break in HTML is a space.
            (self.title if self._in_title else self.text).append(re.sub(r"\s+", " ", data))

    def close(self) -> None:
        """Do nothing: the parser asks for it."""


def _lines(parts: list[str]) -> str:
    lines = (" ".join(line.split()) for line in "".join(parts).translate(_UNSEEN).split("\n"))
    return "\n".join(filter(None, lines))


def document_fields(document: Any) -> dict[str, str]:
    """Return `docno`, `text`, `title` and the other string fields of a document of ir_datasets.

    `text` is the body without HTML or, for documents without bytes, the default text of ir_datasets.
    """
    fields = {name: value for name, value in document._asdict().items() if isinstance(value, str)}
    docno = fields.pop("doc_id")
    body = getattr(document, "body", None)
    if not isinstance(body, bytes):
        return {"title": "", **fields, "docno": docno, "text": document.default_text()}
    page = decode_body(body, getattr(document, "http_headers", ""))
    kind = getattr(document, "body_content_type", "") or ""
    is_html = "html" in kind.lower() or page.lstrip()[:1] == "<"
    title, text = html_to_text(page) if is_html else ("", page.strip())
    return {**fields, "docno": docno, "title": title, "text": text}


class DecodedDataset(Collection):
    """A collection of ir_datasets with its documents as text: ``pt.get_dataset("longdoc:irds:gov2/trec-tb-2004")``.

    PyTerrier's own ``irds:gov2`` offers no body, since bodies are bytes. Topics and qrels are PyTerrier's.

    Args:
        name: of a dataset of ir_datasets.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._dataset: Any = pt.get_dataset(f"irds:{name}")
        except KeyError as error:
            # PyTerrier would replace a KeyError with its own.
            raise ValueError(f"ir_datasets has no dataset {name!r}; see https://ir-datasets.com") from error

    @property
    def papers(self) -> tuple[str, ...]:  # type: ignore[override]
        """The entries that ir_datasets names."""
        return of_ir_datasets(self._dataset.irds_ref())

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """Return the topics as ``irds:`` gives them."""
        return self._dataset.get_topics(variant)

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """Return the qrels as ``irds:`` gives them."""
        return self._dataset.get_qrels(variant)

    def info_url(self) -> str | None:
        """Return where ir_datasets describes it."""
        return self._dataset.info_url()

    def text_loader(self, fields: Sequence[str] | str = "text", *, verbose: bool = False) -> pt.Transformer:
        """Return a transformer that adds texts to any frame with a ``docno`` column.

        Args:
            fields: one or several of `text`, `title` and the document's string fields; "*" takes `text` and `title`.
            verbose: show a progress bar.
        """
        return super().text_loader(["text", "title"] if fields == "*" else fields, verbose=verbose)

    def _fields(self) -> list[str]:
        # The class has them without a download: a pipeline is made before it is run.
        kinds = self._dataset.irds_ref().docs_cls().__annotations__
        strings = (name for name, kind in kinds.items() if kind is str and name != "doc_id")
        return list(dict.fromkeys(["text", "title", *strings]))

    @cached_property
    def documents(self) -> Documents:
        """All documents, docno -> `document_fields`, read and decoded on demand."""
        return DecodedDocuments(self._dataset.irds_ref())

    def _describe_component(self, component: str) -> bool | None:
        attribute = {"corpus": "has_docs", "topics": "has_queries", "qrels": "has_qrels"}.get(component)
        return True if attribute and getattr(self._dataset.irds_ref(), attribute)() else None

    def __repr__(self) -> str:
        return f"DecodedDataset({self.name!r})"


@dataclass(frozen=True, eq=False)
class DecodedDocuments(StreamedDocuments):
    """The documents of a dataset of ir_datasets, docno -> `document_fields`, decoded when they are read."""

    dataset: Any

    def rows(self) -> Iterator[Mapping[str, str]]:
        """Read all documents, one after the other."""
        return map(document_fields, self.dataset.docs_iter())

    def many(self, docnos: Sequence[str]) -> Documents:
        """Read these documents in the order of their files; missing ones are left out."""
        documents = self.dataset.docs_store().get_many_iter(docnos)
        return {fields["docno"]: fields for fields in map(document_fields, documents)}

    def __getitem__(self, docno: str) -> Mapping[str, str]:
        return self.many([docno])[docno]

    def __iter__(self) -> Iterator[str]:
        return (document.doc_id for document in self.dataset.docs_iter())

    def __len__(self) -> int:
        return self.dataset.docs_count()
