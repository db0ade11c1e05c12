"""The layers hold, light imports stay light, and no machine leaves its traces in the tree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LIGHT_FOLDERS = ("engine/scheduling", "engine/memory")
LIGHT_MODULES = ["engine.core", "engine.service", "engine.simulated_runner"]

# Paths of one person's machine; the spelling keeps this file from naming itself.
MACHINE_PATHS = re.compile(r"/(?:wor[k]|roo[t]|home/\w+)/|\.librar[y]\b|(?<![\w.])share[d]/")


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_import_contract_is_kept():
    lint_imports = Path(sys.executable).with_name("lint-imports")

    result = run(str(lint_imports), "--no-cache", "--no-logo")

    assert result.returncode == 0, result.stdout + result.stderr


def test_scheduling_core_and_service_load_neither_torch_nor_sql():
    """Also what import-linter cannot see: imports by name at run time."""
    modules = LIGHT_MODULES + [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in LIGHT_FOLDERS
        for path in (ROOT / folder).glob("*.py")
    ]
    program = (
        f"import importlib, sys\n[importlib.import_module(m) for m in {modules}]\n"
        "print({'torch', 'triton', 'numpy', 'sqlalchemy', 'starlette'} & sys.modules.keys())"
    )

    result = run(sys.executable, "-c", program)

    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_help_loads_neither_torch_nor_sql():
    program = (
        "import sys\nfrom gateway.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "print({'torch', 'numpy', 'sqlalchemy', 'starlette', 'httpx'} & sys.modules.keys())"
    )

    result = run(sys.executable, "-c", program)

    assert result.stdout.splitlines()[-1] == "set()", result.stdout + result.stderr


def tracked_files():
    listing = run("git", "ls-files", "-z")
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_tracked_file_names_a_path_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]

    assert found == []
