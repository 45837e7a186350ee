"""The rules of the house: layers, and what must work without torch."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offline_diffusion

PACKAGE = Path(offline_diffusion.__file__).parent
WITHOUT_TORCH = (
    "request",
    "config",
    "errors",
    "progress",
    "stages",
    "pulse",
    "engine_watch",
    "data",
    "engine.scheduler",
    "engine.policies",
    "models.modes",
    "draw_loop",
    "engine.cost",
    "launch",
    "bench",
    "cli",
)


def modules_under(name: str) -> list[str]:
    module = importlib.import_module(f"offline_diffusion.{name}")
    if not hasattr(module, "__path__"):
        return [module.__name__]
    return [found.name for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}.")]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_importing_needs_no_torch(name: str) -> None:
    names = ["offline_diffusion", *modules_under(name)]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "print(*sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.split() == []


def test_the_public_names_load_when_used() -> None:
    code = (
        "import sys, offline_diffusion as od\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(od.__all__) <= set(dir(od))\n"
        "od.SamplingParams(), od.Request, od.RequestOutput, od.__version__\n"
        "assert 'torch' not in sys.modules\n"
        "od.OfflineDiffusion\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Offline'"):
        offline_diffusion.Offline  # noqa: B018


def test_import_contracts_are_kept() -> None:
    pytest.importorskip("importlinter", reason="a tool of the dev extra")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    result = subprocess.run(command, cwd=PACKAGE.parent, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_init_files_are_empty_but_for_the_root() -> None:
    filled = [path for path in PACKAGE.rglob("__init__.py") if path.stat().st_size]
    assert filled == [PACKAGE / "__init__.py"]


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: n for path, n in lengths.items() if n > 400} == {}


def test_no_function_is_too_long() -> None:
    too_long = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > 80:
                    too_long.append(f"{path.name}:{node.name}")
    assert too_long == []


def test_nothing_is_pickled() -> None:
    imported = {
        alias.name.split(".")[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not imported & {"pickle", "shelve", "marshal", "dill", "cloudpickle"}


def test_there_are_no_locks_and_no_memory_maps() -> None:
    """Neither holds on every file system of a cluster. Arrow maps a file only when it is asked to."""
    forbidden = re.compile(r"\b(fcntl|flock|lockf|mmap|mmap_mode|memmap|memory_map)\b")
    assert {path.name for path in PACKAGE.rglob("*.py") if forbidden.search(path.read_text())} == set()


def test_nothing_that_can_run_code_is_loaded() -> None:
    """torch.load, numpy's pickles, YAML's objects, eval, and code that checkpoints and datasets bring."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            is_bad = (
                name in ("torch.load", "torch.hub.load", "eval", "exec", "yaml.load", "yaml.unsafe_load")
                or (name == "np.load" and options.get("allow_pickle") != "False")
                or options.get("trust_remote_code", "False") != "False"
                or (name.endswith(".from_pretrained") and options.get("use_safetensors") != "True")
            )
            found += [f"{path.name}:{node.lineno}: {name}"] if is_bad else []
    assert found == []
