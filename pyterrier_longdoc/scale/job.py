"""The folder of a job: who makes its results, from what, and whether that is still so."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyterrier as pt

from ..common.files import write_lines
from ..common.notices import warn
from ..common.once import made_once
from ..common.registry import VOUCH, own_code_in
from ..experiment.identity import Identities, differences
from .blocks import BlockFolder
from .candidates import Candidates, DealtCandidates, Source, deal

_FORMAT = 1
"""Part of every manifest; raise it when the same job would give other files."""

_CANDIDATES, _BLOCKS, _SHARDS, _MANIFEST = "candidates", "blocks", "shards", "manifest.json"


class Job:
    """A pipeline and candidates, and the folder of their results.

    `candidates/` has `manifest.json` (who makes the results, from what) and, of candidates in files, the dealt rows;
    `blocks/` what is finished; `shards/` which shards were begun. The first appears as a whole, so that of many
    processes that start at once one begins the job and all others join it.

    Args:
        out: the folder.
        pipeline: makes the results.
        source: the candidates.

    Raises:
        FileExistsError: if the folder holds something else.
        ValueError: if the job in it is another one.
    """

    def __init__(self, out: Path, pipeline: pt.Transformer, source: Source) -> None:
        self.out, self.pipeline, self.source = out, pipeline, source
        foreign = _foreign(out)  # before the manifest is looked for, which another process may write at any moment
        manifest = read_manifest(out)
        if manifest is None and foreign:
            raise FileExistsError(
                f"{str(out)!r} holds other files ({', '.join(foreign[:5])}): choose a new or empty folder"
            )
        told = Identities().of(pipeline)
        own = own_code_in(told.told)
        if own:
            raise ValueError(
                f"the blocks of a job must be made by the same code, and of {', '.join(own)} nobody can tell: score "
                f"without rerank_to_disk. {VOUCH}"
            )
        self._files = source.files_told([] if manifest is None else manifest["files"])
        self._identity = {"format": _FORMAT, "pipeline": told.told, **source.digests(self._files)}
        self.blocks = _blocks(out, self._identity)
        if manifest is None:
            return
        self._check(manifest)
        if told.unchecked:
            names = ", ".join(told.unchecked)
            warn(f"{str(out)!r} was begun before; nobody can tell if with the same {names}", UserWarning)

    def begin(self, shard: tuple[int, int], tell: Callable[[str], None]) -> Candidates:
        """Deals the candidates if no other process has done so; returns them.

        Args:
            shard: that is begun.
            tell: is told what takes time.

        Raises:
            ValueError: if another process has begun another job here, or a column cannot be written.
            OSError: if there is no space left, among others.
        """
        in_memory = self.source.in_memory()

        def make(folder: Path) -> None:
            if in_memory is None:
                tell("dealing the candidates to blocks")
            rows = deal(self.source.parts(), folder) if in_memory is None else in_memory.rows
            manifest = {"identity": self._identity, "files": self._files, "rows": rows}
            write_lines(folder / _MANIFEST, [json.dumps(manifest, indent=1)])

        folder = self.out / _CANDIDATES
        (self.out / _SHARDS).mkdir(parents=True, exist_ok=True)
        (self.out / _SHARDS / "{}-of-{}".format(*shard)).touch()
        try:
            made_once(folder, make, lambda owner: tell(f"waiting for {owner}, which deals the candidates"))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            message = "no space is left for the candidates, which need about as much as their files"
            raise OSError(errno.ENOSPC, message, str(folder)) from error
        manifest = read_manifest(self.out)
        if manifest is None:
            raise FileNotFoundError(f"{str(folder)!r} was deleted while it was in use")
        self._check(manifest)
        return in_memory or DealtCandidates(folder, manifest["rows"])

    def _check(self, manifest: dict[str, Any]) -> None:
        differ = differences(manifest["identity"], self._identity)
        if differ:
            raise ValueError(
                f"{str(self.out)!r} was begun with something else, which differs in {', '.join(differ)}: go on with "
                f"what it was begun with, or choose another folder"
            )


def read_manifest(out: Path) -> dict[str, Any] | None:
    """Who makes the results in a folder, from which files, and the rows of each block; None if no job was begun there.

    Raises:
        ValueError: if it cannot be read.
    """
    file = out / _CANDIDATES / _MANIFEST
    if not file.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = manifest["identity"], manifest["files"], manifest["rows"]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged ({error!r}): delete the folder {str(file.parent)!r}, and the same call of "
            f"rerank_to_disk makes it anew; what is scored stays"
        ) from error
    return manifest


def finished_blocks(out: Path) -> tuple[BlockFolder, list[int]]:
    """The finished blocks of a folder, and their keys.

    Raises:
        FileNotFoundError: if no job was begun there, or blocks are missing.
        ValueError: if blocks are damaged.
    """
    manifest = read_manifest(out)
    if manifest is None:
        raise FileNotFoundError(f"{str(out)!r} is no folder of rerank_to_disk")
    keys = [key for key, rows in enumerate(manifest["rows"]) if rows]
    blocks = _blocks(out, manifest["identity"])
    missing = blocks.unfinished(keys)
    if missing:
        some = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise FileNotFoundError(
            f"{len(missing)} of the {len(keys)} blocks in {str(out)!r} are not finished ({some}; of "
            f"{sum(manifest['rows'][key] for key in missing):,} rows): {_who_lacks(out, missing)}"
        )
    return blocks, keys


def _who_lacks(out: Path, missing: Iterable[int]) -> str:
    begun = [tuple(map(int, path.name.split("-of-"))) for path in (out / _SHARDS).glob("*-of-*")]
    parts = []
    for n in sorted({n for _, n in begun}):
        lacking = {key % n for key in missing}
        names = [f"{i} ({'not finished' if (i, n) in begun else 'not begun'})" for i in sorted(lacking)]
        parts.append(f"{', '.join(names)} of {n}")
    return f"call rerank_to_disk again for the shards {'; or '.join(parts)}"


def _blocks(out: Path, identity: dict[str, Any]) -> BlockFolder:
    job = blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()
    return BlockFolder(out / _BLOCKS, job)


def _foreign(out: Path) -> list[str]:
    """What a folder has besides blocks whose candidates were deleted."""
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    return sorted(name for name in names if name not in (_BLOCKS, _SHARDS) and not name.startswith(f".{_CANDIDATES}."))
