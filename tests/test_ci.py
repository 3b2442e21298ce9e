"""The workflows run what .ci/run has, and a release's tag is that of its version."""

import re
import tomllib
from pathlib import Path

import check_tag
import pytest
from families import is_in_part

ROOT = Path(__file__).parents[1]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
RUN = (ROOT / ".ci" / "run").read_text()


def stages():
    [storage] = re.findall(r'(?ms)^STORAGE="(.*?)"', RUN)
    run = RUN.replace("$STORAGE", " ".join(storage.split()))
    return re.findall(r'(?m)^stage (\w+) "make [\w-]+"(.*)$', run)


def test_every_stage_is_in_the_workflow():
    listed = re.search(r"(?m)^ +stage:\n((?: +- \w+\n)+)", WORKFLOW)
    assert listed
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


def test_each_test_is_in_one_part():
    names = [f"tests/test_a.py::test_b[{n}]" for n in range(400)]
    parts = [sum(is_in_part(x, f"{k}/4") for x in names) for k in range(4)]
    assert sum(parts) == len(names)
    assert min(parts) > 50


def test_the_supported_pythons_are_tried():
    listed = re.search(r"python: \[(.*)\]", WORKFLOW)
    assert listed
    assert re.findall(r"3\.\d+", listed[1]) == ["3.11", "3.12", "3.13", "3.14"]


RELEASE = {
    "pyproject.toml": '[project]\nversion = "1.2.3"\nurls.Source = "https://a.example"\n',
    "CITATION.cff": "version: 1.2.3\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2027-01-01)\n",
}


@pytest.mark.parametrize(
    ("tag", "changed", "found"),
    [
        ("v1.2.3", {}, None),
        ("1.2.3", {}, r"expected v1\.2\.3, the version of pyproject\.toml; delete"),
        ("v1.2.4", {}, r"expected v1\.2\.3"),
        (
            "v1.2.3",
            {"pyproject.toml": '[project]\nversion = "1.2.3"\n'},
            r"expected \[project\.urls\] in pyproject\.toml",
        ),
        ("v1.2.3", {"CITATION.cff": "version: 1.2.2\n"}, "1.2.3' in CITATION.cff"),
        ("v1.2.3", {"CHANGELOG.md": "## Unreleased\n"}, "a section '## 1.2.3'"),
    ],
)
def test_a_tag_is_compared_with_what_the_release_says(tmp_path, tag, changed, found):
    for name, text in (RELEASE | changed).items():
        (tmp_path / name).write_text(text)
    said = check_tag.problem(tag, tmp_path)
    assert said is None if found is None else re.search(found, said or "")


def test_the_citation_has_the_package_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
