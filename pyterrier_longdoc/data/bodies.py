"""Web collections whose documents are bytes (GOV2, ClueWeb09): decoded, and freed of HTML."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import pyterrier as pt

from pyterrier_longdoc.common.presentation import HELP_URL

_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_META = re.compile(rb"<meta[^>]*charset[^>]*>", re.IGNORECASE)
_CHARSETS = {  # as browsers read them, who follow what pages contain, not what they claim
    "iso8859-1": "windows-1252",
    "shift-jis": "cp932",
    "x-sjis": "cp932",
    "windows-31j": "cp932",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "x-gbk": "gb18030",
    "euc-kr": "cp949",
    "x-euc-jp": "euc-jp",
}
_NO_CHARSETS = {"ascii", "idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7"}
_HEAD = 4096  # bytes that are searched for a <meta>
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_HIDDEN = {"script", "style", "noscript", "template"}
_INLINE = (  # noqa: SIM905 - shorter than a list of literals
    "a abbr acronym b bdi bdo big cite code del dfn em font i ins kbd label mark q s samp small span strike strong sub "
    "sup tt u var wbr"
).split()


def decode_body(body: bytes, http_headers: bytes | str = "") -> str:
    """Decodes a web page.

    The encoding is that of the byte order mark, else of the HTTP header, else of a `<meta>` element; where there is
    none, or none that Python knows, UTF-8 if the body is that, else Windows-1252. Names stand for what browsers take
    them for: ISO-8859-1 for Windows-1252, ASCII for nothing. Bytes that make no sense become replacement characters.

    Example:
        >>> decode_body("naïve".encode("latin-1"), "Content-Type: text/html; charset=ISO-8859-1")
        'naïve'
    """
    headers = http_headers.decode("latin-1") if isinstance(http_headers, bytes) else http_headers or ""
    marks = [name for mark, name in _BYTE_ORDER_MARKS.items() if body.startswith(mark)]
    metas = [meta.decode("latin-1") for meta in _META.findall(body[:_HEAD])]
    named = [_charset(match.group(1)) for match in _CHARSET.finditer(headers)]
    in_page = [_charset(match.group(1)) for meta in metas for match in _CHARSET.finditer(meta)]
    # An element that can be read byte by byte is not in UTF-16, whatever it says.
    named += [name for name in in_page if not name.startswith(("utf-16", "utf-32"))]
    for encoding in filter(None, [*marks, *named]):
        try:
            return body.decode(encoding, errors="replace")
        except (LookupError, UnicodeError):  # no such encoding, or one that knows no replacement
            continue
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("windows-1252", errors="replace")


def _charset(name: str) -> str:
    """Python's name of a charset; empty for what is none."""
    try:
        known = codecs.lookup(name).name
    except LookupError:
        known = name.lower()
    known = known.replace("_", "-")
    return "" if known in _NO_CHARSETS else _CHARSETS.get(known, known)


def html_to_text(html: str) -> tuple[str, str]:
    r"""Title and text of a page: what a browser shows, one line for each block, without scripts and style sheets.

    Example:
        >>> html_to_text("<title>A page</title><p>Two<b>fold</b> text</p><table><td>one<td>two</table>")
        ('A page', 'Twofold text\none\ntwo')
    """
    from lxml import etree

    target = _Text()
    # lxml's parser survives any page; libxml2 would stop at a null.
    parser = etree.HTMLParser(target=target, huge_tree=True)
    parser.feed(html.replace("\0", " ").encode("utf-8", "replace").decode())
    if html.strip():
        parser.close()
    return _lines(target.title).replace("\n", " "), _lines(target.text)


def document_fields(document: Any) -> dict[str, str]:
    """The text of a document of ir_datasets.

    Args:
        document: a named tuple of ir_datasets, its body bytes or not.

    Returns:
        `docno`, `text`, `title` and the document's other fields that are strings. `text` is the body freed of HTML, or,
        for documents without bytes, what ir_datasets takes for their text.
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


class DecodedDataset(pt.datasets.Dataset):
    """A collection of ir_datasets with its documents as text: ``pt.get_dataset("longdoc:irds:gov2/trec-tb-2004")``.

    PyTerrier's own ``irds:gov2`` offers no body, since that is bytes. Topics and qrels are PyTerrier's.

    Args:
        dataset: name of a dataset of ir_datasets, or one itself.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, str):
            import ir_datasets

            dataset = ir_datasets.load(dataset)
        self._dataset = dataset
        self.name = dataset.dataset_id()
        self._loaders: dict[tuple[tuple[str, ...], bool], BodyLoader] = {}

    def get_topics(self, variant: str | None = None) -> pd.DataFrame:
        """The topics as ``irds:`` gives them."""
        return pt.get_dataset(f"irds:{self.name}").get_topics(variant)

    def get_qrels(self, variant: str | None = None) -> pd.DataFrame:
        """The qrels as ``irds:`` gives them."""
        return pt.get_dataset(f"irds:{self.name}").get_qrels(variant)

    def get_corpus_iter(self, *, verbose: bool = True) -> pt.model.IterDict:
        """Iterates over the documents: dicts of `docno`, `text`, `title` and further fields."""
        documents, total = self._dataset.docs_iter(), self._dataset.docs_count()

        def generate() -> Iterator[dict[str, str]]:
            rows = pt.tqdm(documents, desc=f"{self.name} documents", total=total) if verbose else documents
            yield from map(document_fields, rows)

        return pt.utils.GeneratorLen(generate(), total)

    def text_loader(self, fields: Sequence[str] | str = "text", *, verbose: bool = False) -> pt.Transformer:
        """A transformer that adds the texts to any frame with a ``docno`` column.

        Args:
            fields: one or several of `text`, `title` and the document's string fields; "*" takes `text` and `title`.
            verbose: show a progress bar.
        """
        wanted = ["text", "title"] if fields == "*" else [fields] if isinstance(fields, str) else list(fields)
        key = (tuple(wanted), verbose)
        if key not in self._loaders:
            self._loaders[key] = BodyLoader(self._dataset, wanted, verbose=verbose)
        return self._loaders[key]

    def info_url(self) -> str:
        """Where ir_datasets describes it."""
        return f"https://ir-datasets.com/{self.name.partition('/')[0]}.html#{self.name}"

    def _describe_component(self, component: str) -> bool | None:
        has = {"corpus": "has_docs", "topics": "has_queries", "qrels": "has_qrels"}.get(component)
        return True if has and getattr(self._dataset, has)() else None

    def __repr__(self) -> str:
        return f"DecodedDataset({self.name!r})"


class BodyLoader(pt.Transformer):
    """Adds texts from a document store of ir_datasets, decoded; see `DecodedDataset.text_loader`.

    Rows, their order, their index and all other columns are kept; a column of the same name is replaced.
    """

    def __init__(self, dataset: Any, fields: Sequence[str], *, verbose: bool = False) -> None:
        self._dataset = dataset
        self.fields = list(fields)
        self.verbose = verbose

    def transform(self, inp: pd.DataFrame) -> pd.DataFrame:
        """Adds the fields.

        Raises:
            KeyError: if a docno is not in the collection.
            ValueError: if the documents have no such field.
        """
        pt.validate.columns(inp, includes=["docno"], context=self)
        docnos = [str(docno) for docno in inp["docno"]]
        rows = self._rows(docnos) if docnos else {}
        out = inp.drop(columns=self.fields, errors="ignore")
        columns = {field: pd.Series([rows[docno][field] for docno in docnos], dtype=str).array for field in self.fields}
        return out.assign(**columns)

    def schematic(self, *, input_columns: list[str] | None = None) -> dict[str, Any]:
        """How PyTerrier draws this transformer."""
        return {"label": "BodyLoader", "help_url": HELP_URL, "settings": {"fields": self.fields}}

    def _rows(self, docnos: list[str]) -> dict[str, dict[str, str]]:
        found = self._dataset.docs_store().get_many_iter(list(dict.fromkeys(docnos)))
        rows = {}
        for document in pt.tqdm(found, desc="BodyLoader", unit="d", disable=not self.verbose):
            fields = document_fields(document)
            unknown = [field for field in self.fields if field not in fields]
            if unknown:
                raise ValueError(f"documents have no field {unknown[0]!r}; their fields are {sorted(fields)}")
            rows[fields["docno"]] = {field: fields[field] for field in self.fields}
        missing = [docno for docno in docnos if docno not in rows]
        if missing:
            raise KeyError(f"docno {missing[0]!r} is not in the collection {self._dataset.dataset_id()!r}")
        return rows

    def __repr__(self) -> str:
        return f"BodyLoader({self._dataset.dataset_id()!r}, {self.fields!r})"


class _Text:
    """Collects what a parser reports."""

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
        """Nothing is left to do."""


def _lines(parts: list[str]) -> str:
    lines = (" ".join(line.split()) for line in "".join(parts).split("\n"))
    return "\n".join(filter(None, lines))
