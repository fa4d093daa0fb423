"""Libraries that are missing, and folders that are told by their files."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import pyterrier_longdoc
from pyterrier_longdoc.common.files import folder_digest, import_extra

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pyterrier_longdoc.__file__).parent


def test_a_missing_library_is_reported_with_its_package_name():
    for module, package in [("no_such_module.part", "no-such-module"), ("sklearn.nothing", "scikit-learn")]:
        with pytest.raises(ImportError, match=package):
            import_extra(module, "llm", "grades need it")


def test_modules_and_packages_of_the_extras_agree():
    """Every module that `import_extra` is asked for belongs to a package of the extra that the message names."""
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    calls = [
        call
        for path in PACKAGE.rglob("*.py")
        for call in re.findall(r'import_extra\("([\w.]+)", "(\w+)"', path.read_text(encoding="utf-8"))
    ]
    assert calls
    for module, extra in calls:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("importlib.import_module", Mock(side_effect=ModuleNotFoundError))
            with pytest.raises(ImportError) as caught:
                import_extra(module, extra, "x")
        package = re.search(r"pip install (\S+)", str(caught.value))[1].strip("'")
        assert package in [re.split(r"[<>=~!]", name)[0] for name in extras[extra]], (module, extra)


def test_the_digest_of_a_folder_depends_on_the_contents_of_its_files(tmp_path):
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "weights.bin"
    seen = []
    for content in (b"one", b"two", b"one"):
        file.write_bytes(content)
        os.utime(file, ns=(10**18, 10**18))
        seen += [folder_digest(tmp_path), folder_digest(tmp_path)]
        time.sleep(0.05)  # longer than the clock of a file system takes to tick
    assert seen[0] == seen[1] == seen[4] != seen[2]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "lock").write_text("x")
    assert folder_digest(tmp_path) == seen[-1]
    file.rename(tmp_path / "weights.bin")
    assert folder_digest(tmp_path) != seen[-1]
