"""What to cite for the models, collections and measures of pipelines and experiments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import ir_measures
import pyterrier as pt

from ..common.citations import Cited, bibtex, of_ir_datasets
from ..common.measures import measures_named
from .identity import stages_below, stages_of

PAPERS_OF_MEASURES = {"journals/tois/JarvelinK02": "jarvelin-2002-cumulated"}
"""The keys of `references.bib` for measures whose paper, by its key at DBLP, ir_measures names."""

_DBLP = re.compile(r"cite\.dblp:: (\S+)")


@dataclass
class Sources:
    """Papers behind something that was used, and what of it names none.

    Attributes:
        papers: keys of `references.bib`, or BibTeX entries.
        unknown: what no paper is known of, in words.
    """

    papers: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(self, other: Sources) -> None:
        """Adds those of something else."""
        self.papers += [paper for paper in other.papers if paper not in self.papers]
        self.unknown += [name for name in other.unknown if name not in self.unknown]

    @classmethod
    def of_all(cls, several: Iterable[Sources]) -> Sources:
        """Those of several things, each once."""
        together = cls()
        for each in several:
            together.add(each)
        return together

    def as_dict(self) -> dict[str, list[str]]:
        """For JSON; `Sources(**...)` restores them."""
        return asdict(self)

    def __str__(self) -> str:
        comments = "\n".join(f"% no citation is known of {name}" for name in self.unknown)
        return "\n\n".join(filter(None, [bibtex(self.papers), comments]))


def citations(*used: Any) -> str:
    """BibTeX of what was used, each entry once.

    Args:
        *used: pipelines and models, of which all parts count, with the collections that their text loaders read;
            datasets; measures.

    Returns:
        The entries, and a comment for each part that names no paper, such as a retriever of another package.

    Raises:
        ValueError: for something else.

    Example:
        `print(citations(bm25 >> ld.PARADE(), dataset, nDCG @ 10))`.
    """
    return str(Sources.of_all(map(sources_of, used)))


def sources_of(used: Any) -> Sources:
    """Of a pipeline, a dataset or a measure: see `citations`."""
    sources = Sources()
    if isinstance(used, pt.Transformer):
        for stage in _with_models(used):
            sources.add(_of_stage(stage))
    elif isinstance(used, pt.datasets.Dataset):
        sources.add(_of_dataset(used))
    elif isinstance(used, str | ir_measures.Measure):
        sources.add(sources_of_measures([used]))
    else:
        raise ValueError(f"{used!r} is no pipeline, dataset or measure: nothing is known of what to cite for it")
    return sources


def _with_models(pipeline: pt.Transformer) -> Iterator[Any]:
    """The parts of a pipeline, with models that stand behind one: those of folds."""
    for stage in stages_of(pipeline):
        yield stage
        for model in getattr(stage, "models", ()):
            yield from _with_models(model)


def _of_stage(stage: Any) -> Sources:
    sources = Sources()
    loader = getattr(stage, "text_loader", None)
    if isinstance(loader, pt.Transformer):
        sources.add(sources_of(loader))
    elif isinstance(loader, pt.datasets.Dataset):
        sources.add(_of_dataset(loader))
    if isinstance(getattr(stage, "dataset", None), pt.datasets.Dataset):
        sources.add(_of_dataset(stage.dataset))
        return sources
    papers = stage.cited() if isinstance(stage, Cited) else list(getattr(stage, "papers", None) or ())
    is_operator = any(True for _ in stages_below(stage)) or type(stage).__module__.startswith("pyterrier._")
    unknown = [] if papers or is_operator or hasattr(stage, "models") else [f"the transformer {type(stage).__name__}"]
    sources.add(Sources(papers, unknown))
    return sources


def _of_dataset(dataset: Any) -> Sources:
    if hasattr(dataset, "irds_ref"):
        papers, name = list(of_ir_datasets(dataset.irds_ref())), f"irds:{dataset.irds_ref().dataset_id()}"
    else:
        papers, name = list(getattr(dataset, "papers", ())), getattr(dataset, "name", type(dataset).__name__)
    return Sources(papers, [] if papers else [f"the collection {name}"])


def sources_of_measures(measures: Iterable[Any]) -> Sources:
    """The papers that ir_measures names; counts and shares, such as recall, have none."""
    sources = Sources()
    for measure in measures:
        family = measures_named(measure) if isinstance(measure, str) else [measure]
        for each in family:
            named = _DBLP.findall(type(each).__doc__ or getattr(each, "__doc__", "") or "")
            papers = [PAPERS_OF_MEASURES[key] for key in named if key in PAPERS_OF_MEASURES]
            links = [f"https://dblp.org/rec/{key}.bib" for key in named if key not in PAPERS_OF_MEASURES]
            sources.add(Sources(papers, [f"the measure {each.NAME} here: it is at {link}" for link in links]))
    return sources


def restored(told: Mapping[str, list[str]] | None) -> Sources:
    """What `as_dict` told; nothing of None."""
    return Sources(**{name: list(values) for name, values in (told or {}).items()})
