"""The workflows run what .ci/run has, and a release's tag is that of its version."""

import re
import tomllib
from pathlib import Path

import check_tag
import pytest

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
RUN = (ROOT / ".ci" / "run").read_text()


def stages():
    [storage] = re.findall(r'(?ms)^STORAGE="(.*?)"', RUN)
    run = RUN.replace("$STORAGE", " ".join(storage.split()))
    return re.findall(r'(?m)^stage (\w+) "make [\w-]+"(.*)$', run)


def test_every_stage_is_in_the_workflow():
    listed = re.search(r"(?m)^ +stage:\n((?: +- \w+\n)+)", WORKFLOW)
    named = re.findall(r"- (\w+)", listed[1]) + re.findall(
        r"run: .ci/run (\w+)", WORKFLOW
    )
    assert sorted(named) == sorted(name for name, _ in stages())


@pytest.mark.parametrize(("name", "inputs"), stages())
def test_a_stage_names_inputs_that_exist(name, inputs):
    if name in ("test", "lint"):
        assert not inputs.strip()
        return
    words = re.sub(r'"( \d)?$', "", inputs.strip()).strip('"').split()
    assert words, f"{name}: expected its inputs, without which it always runs"
    missing = [w for w in words if not (ROOT / w).exists()]
    assert not missing


RELEASE = {
    "pyproject.toml": '[project]\nversion = "1.2.3"\nurls.Source = "https://a.example"\n',
    "CITATION.cff": "version: 1.2.3\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2027-01-01)\n",
}


def test_a_tag_is_compared_with_what_the_release_says(tmp_path):
    for name, text in RELEASE.items():
        (tmp_path / name).write_text(text)
    assert check_tag.problem("v1.2.3", tmp_path) is None
    said = "expected v1.2.3, the version of pyproject.toml; delete"
    assert said in str(check_tag.problem("1.2.3", tmp_path))
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n")
    assert "a section '## 1.2.3'" in str(check_tag.problem("v1.2.3", tmp_path))


def test_the_citation_has_the_package_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
