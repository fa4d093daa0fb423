"""What is said of a library that is missing."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

import pyterrier_longdoc
from pyterrier_longdoc.common import files
from pyterrier_longdoc.common.files import folder_digest, import_extra

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pyterrier_longdoc.__file__).parent


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("no_such_module", "no-such-module"),
        ("no_such_module.part", "no-such-module"),
        ("sklearn.nothing", "scikit-learn"),
    ],
)
def test_a_missing_library_is_installed_by_the_name_of_its_package(module, package):
    with pytest.raises(ImportError, match=rf"^grades need it: pip install {package} \(it is in the extra \[llm\]\)$"):
        import_extra(module, "llm", "grades need it")


def test_no_command_needs_this_package_to_be_on_pypi():
    """It is not there: it is installed from a checkout or an archive."""
    texts = [ROOT / "README.md", *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.rst"), *ROOT.glob("notebooks/*.ipynb")]
    commands = {path: re.findall(r"pip install [^`\n]*", path.read_text(encoding="utf-8")) for path in texts}
    assert sum(map(len, commands.values())) >= 8
    assert [found for found in commands.items() if any("pyterrier-longdoc" in command for command in found[1])] == []


def test_modules_and_packages_of_the_extras_agree():
    """Every module that `import_extra` is asked for belongs to a package of the extra that the message names."""
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    calls = [
        call
        for path in PACKAGE.rglob("*.py")
        for call in re.findall(r'import_extra\("([\w.]+)", "(\w+)"', path.read_text(encoding="utf-8"))
    ]
    assert len(calls) >= 8
    for module, extra in calls:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("importlib.import_module", _missing)
            with pytest.raises(ImportError) as caught:
                import_extra(module, extra, "x")
        package = re.search(r"pip install (\S+)", str(caught.value))[1]
        assert package in [re.split(r"[<>=~!]", name)[0] for name in extras[extra]], (module, extra)


def _missing(name):
    raise ModuleNotFoundError(name)


def test_a_folder_is_told_by_the_contents_of_its_files(tmp_path):
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "weights.bin"
    seen = []
    for content in (b"one", b"two", b"one", b"six"):  # at once, and with the same size and time
        file.write_bytes(content)
        os.utime(file, ns=(10**18, 10**18))
        seen.append(folder_digest(tmp_path))
    assert seen[0] == seen[2]
    assert len(set(seen)) == 3
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "lock").write_text("x")
    assert folder_digest(tmp_path) == seen[-1]
    file.rename(tmp_path / "weights.bin")
    assert folder_digest(tmp_path) != seen[-1]


def test_files_that_have_not_changed_for_long_are_read_once(tmp_path, monkeypatch):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"one")
    read, digest = [], files.file_digest
    monkeypatch.setattr(files, "file_digest", lambda path: read.append(path) or digest(path))
    later = time.time_ns() + 10**10
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert len({folder_digest(tmp_path) for _ in range(3)}) == 1
    assert read == [file]
    stat = file.stat()
    time.sleep(0.05)
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert folder_digest(tmp_path) == folder_digest(tmp_path)
    assert read == [file] * 2
