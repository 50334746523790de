"""`import dsagen` is cheap, and needs neither torch nor a driver nor a toolkit."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dsagen

ROOT = Path(dsagen.__file__).parent.parent


def test_import_loads_no_heavy_package():
    code = "import sys, dsagen; print([m for m in ('torch', 'cuda', 'pydantic', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_spec_needs_no_torch():
    code = "import sys, dsagen; dsagen.DeploymentSpec; print('torch' in sys.modules, dsagen.DeploymentSpec.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "DeploymentSpec"]


def test_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dsagen.__version__ == project["version"]


def test_every_public_name_resolves():
    assert all(getattr(dsagen, name) for name in dsagen.__all__)
    assert set(dsagen.__all__) <= set(dir(dsagen))


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match=r"no attribute 'laod'; it has .*load"):
        dsagen.laod  # noqa: B018 - the access is the test
