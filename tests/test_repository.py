"""The repository itself: dependencies in step, nothing in it that does not belong, commands that exist."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from lock import EXTRAS  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CONDA_NAMES = {"pytorch": "torch"}  # where conda-forge has another name
SYSTEMS = [
    {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux", "platform_machine": "x86_64"},
    {"sys_platform": "darwin", "os_name": "posix", "platform_system": "Darwin", "platform_machine": "arm64"},
    {"sys_platform": "win32", "os_name": "nt", "platform_system": "Windows", "platform_machine": "AMD64"},
]


def requirements():
    """Every dependency of pyproject.toml that is locked: those of the extras too, but for the rare ones."""
    extras = PROJECT["optional-dependencies"]
    lines = PROJECT["dependencies"] + [line for extra in EXTRAS for line in extras[extra]]
    return [Requirement(line) for line in lines]


def locked():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def files():
    """What is committed or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def marker_applies(requirement, python, system):
    environment = {
        "python_version": python, "python_full_version": f"{python}.9", "implementation_name": "cpython",
        "platform_python_implementation": "CPython", "extra": "", **system,
    }  # fmt: skip
    return requirement.marker is None or requirement.marker.evaluate(environment)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system["sys_platform"])
def test_the_lock_gives_each_dependency_one_version_inside_its_range(python, system):
    versions = {}
    for line in locked():
        assert re.fullmatch(r"==[^*,=]+", str(line.specifier)), f"{line} is not one exact version"
        assert line.url is None
        if marker_applies(line, python, system):
            name = canonicalize_name(line.name)
            assert name not in versions, f"{name} is locked twice for Python {python}"
            versions[name] = Version(str(line.specifier)[2:])
    for wanted in requirements():
        have = versions.get(canonicalize_name(wanted.name))
        assert have is not None, f"{wanted.name} is not locked for Python {python}: python tools/lock.py"
        assert wanted.specifier.contains(have), f"{wanted} is locked at {have}: python tools/lock.py"
    assert versions["torch"] == Version("2.13.0")


def test_the_lock_leaves_torchs_own_packages_and_indices_out():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"^(nvidia-(?!ml-py)|cuda-|triton)", text, re.M)
    assert "://" not in text and "--" not in text.replace("---", "")


def test_conda_users_get_the_same_ranges():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [line for line in environment["dependencies"] if isinstance(line, str)]
    through_pip = next(line["pip"] for line in environment["dependencies"] if isinstance(line, dict))
    given = {}
    for line in conda + [line for line in through_pip if not line.startswith("-e")]:
        requirement = Requirement(line)
        name = CONDA_NAMES.get(requirement.name, requirement.name)
        given[canonicalize_name(name)] = requirement.specifier
    python = given.pop("python")
    given.pop("pip")
    assert given == {canonicalize_name(r.name): r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert all(python.contains(p) for p in PYTHONS) and "3.9" not in python
    assert SpecifierSet(PROJECT["requires-python"]).contains("3.10")
    assert "-e ." in through_pip


def test_every_dependency_has_a_floor_and_a_tested_upper_bound():
    for line in PROJECT["dependencies"]:
        operators = sorted(spec.operator for spec in Requirement(line).specifier)
        assert operators == ["<", ">="], line


def test_what_labkit_imports_is_a_dependency():
    """Each module that the package imports comes from the standard library, the package, or a listed dependency."""
    import ast

    modules = {"pynvml": "nvidia-ml-py", "pytorch_memlab": "pytorch-memlab", "jupyter_client": "jupyter-client"}
    modules |= {"IPython": "ipykernel", "yaml": "accelerate"}  # which cannot be installed without them
    needed = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    extras = {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["dev"]}
    for file in (ROOT / "labkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"labkit"}:
                package = canonicalize_name(modules.get(name, name))
                allowed = needed | extras if file.name == "notebooks.py" or "grading" in file.parts else needed
                assert package in allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_learner_notebooks_are_untouched():
    for path in (ROOT / "notebooks").glob("**/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [] and cell["execution_count"] is None, f"{path.name}: run make notebooks"


def test_no_file_is_large():
    large = {f.relative_to(ROOT).as_posix(): f.stat().st_size for f in files() if f.stat().st_size > 4e6}
    assert large == {}


def test_no_file_names_a_folder_of_somebodys_machine():
    path = re.compile(r"(?<![\w.])/(?:home|Users|root|work|workspace|tmp|private|mnt|content)/[\w.-]+/|[A-Z]:\\Users\\")
    found = []
    for file in files():
        if file.suffix in {".png", ".jpg", ".gz", ".zip"} or file.parent.name == "tests":  # which make paths up
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if path.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def make_targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def test_every_make_target_is_phony_and_in_the_help():
    text = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.+)$", text, re.M)[1].split())
    described = set(re.findall(r"^([a-z-]+):.*## \S", text, re.M))
    assert make_targets() == phony == described
    shown = subprocess.check_output(["make", "help"], cwd=ROOT, text=True)
    assert all(f"make {target} " in shown for target in described)


def test_commands_in_the_documents_exist():
    from labkit import cli

    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    for document in [*ROOT.glob("*.md"), ROOT / "data" / "README.md"]:
        text = document.read_text()
        code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.S))
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", code):
            assert target in make_targets(), f"{document.name} names make {target}"
        for command in re.findall(r"(?<!import )\blabkit ([a-z]+)\b", code):
            assert command in commands, f"{document.name} names labkit {command}"
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
            assert (document.parent / link).exists(), f"{document.name} links to {link}"


def test_ci_runs_what_everybody_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -e" in text and re.search(r"^make test$", text, re.M)


def test_the_gpu_tests_that_are_skipped_here_are_the_listed_ones(pytestconfig):
    from conftest import GPU_ITEMS, MODULES

    names = (ROOT / "tests" / "gpu_tests.txt").read_text().splitlines()
    listed = {name for name in names if not name.startswith("#")}
    collected = set(pytestconfig.stash[MODULES])
    assert {name for name in listed if name.split("::")[0] in collected} == set(pytestconfig.stash[GPU_ITEMS])
    gone = [name for name in listed if not (ROOT / name.split("::")[0]).is_file()]
    assert gone == []


@pytest.mark.parametrize("version", ["3.6.1", "3.9.18"])
def test_an_old_python_is_told_so_in_one_line(version, tmp_path):
    """The set-up script on a Python that says that it is old; its syntax is old enough to get that far."""
    import ast

    script = (ROOT / "tools" / "setup.py").read_text()
    ast.parse(script, feature_version=(3, 6))
    numbers = tuple(map(int, version.split(".")))
    path = str(ROOT / "tools" / "setup.py")
    code = f"import sys, runpy; sys.version_info = {numbers}; runpy.run_path({path!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1 and "3.10 or newer is needed" in done.stdout and done.stderr == ""


def test_the_working_copies_of_a_learner_are_never_overwritten(tmp_path):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import workdir
    finally:
        sys.path.pop(0)
    pristine, work = tmp_path / "notebooks", tmp_path / "work"
    pristine.mkdir()
    work.mkdir()
    for name in ("a", "b"):
        (pristine / f"{name}.ipynb").write_text("lesson 1")
    assert workdir.copy(pristine, work) == []
    (work / "a.ipynb").write_text("lesson 1, with my answers")
    assert workdir.copy(pristine, work) == []
    for name in ("a", "b", "c"):
        (pristine / f"{name}.ipynb").write_text("lesson 2")
    said = workdir.copy(pristine, work)
    assert (work / "a.ipynb").read_text() == "lesson 1, with my answers"
    assert [(work / f"{name}.ipynb").read_text() for name in "bc"] == ["lesson 2", "lesson 2"]
    assert len(said) == 2 and "yours is kept" in said[0] and "updated" in said[1]


def test_the_readme_says_what_the_reference_rows_say():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_python_in_the_readme_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"experiment: fits .* budget 8.00 GiB", done.stdout), done.stdout
