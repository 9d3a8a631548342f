"""Who may import whom, and which files stay pure: read from the source, and seen in a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("kvstore", "workers", "cluster", "deploy")
HEAVY = {"torch", "ray", "transformers", "numpy", "safetensors"}
CLOCKS = {"time", "datetime"}

# What may load torch or ray, or read the clock. Every other file of the three lower layers is pure.
SHELLS = {
    "workers.actors",
    "workers.attention.backend",
    "workers.attention.formats",
    "workers.attention.latent",
    "workers.attention.openblocks",
    "workers.attention.reference",
    "workers.attention.softmax",
    "workers.attention.tiles",
    "workers.batch",
    "workers.footprint",
    "workers.gloo",
    "workers.kvpool",
    "workers.kernels",
    "workers.layers",
    "workers.lead",
    "workers.models.assembly",
    "workers.models.decoder",
    "workers.models.embedding",
    "workers.models.experts",
    "workers.models.latent",
    "workers.models.factory",
    "workers.models.generic.interface",
    "workers.models.generic.model",
    "workers.models.generic.selfcheck",
    "workers.models.generic.walk",
    "workers.models.layer",
    "workers.models.tensors",
    "workers.native.arena",
    "workers.native.attention",
    "workers.native.calls",
    "workers.native.kernels",
    "workers.native.library",
    "workers.native.linear",
    "workers.native.norm",
    "workers.native.packing",
    "workers.native.sampling",
    "workers.native.units",
    "workers.native.workspace",
    "workers.parallel",
    "workers.penalties",
    "workers.rank",
    "workers.rotation",
    "workers.runner",
    "workers.sampler",
    "workers.scoring",
    "workers.selection",
    "workers.sharedmemory",
    "workers.weights",
    "cluster.actors",
    "cluster.departure",
    "cluster.protocol.generating",
    "cluster.group",
    "cluster.incarnation",
    "cluster.ingress",
    "cluster.legacy",
    "cluster.links",
    "cluster.metrics",
    "cluster.loopback",
    "cluster.protocol.routes",
    "cluster.registry",
    "cluster.text.template",
}
TEXT = (
    "cluster.text.tokenizer",
    "cluster.text.template",
    "cluster.protocol.api",
    "cluster.protocol.routes",
    "cluster.errors",
)
CONFIG = ("deploy.config", "deploy.catalog", "deploy.bench.load")


def sources() -> list[Path]:
    return [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(tree: ast.AST) -> set[str]:
    """Modules that `tree` imports, be it as it is loaded, in a function, or for a type checker alone."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def top(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


PURE = tuple(name for path in sources() if (name := name_of(path)) not in SHELLS and not name.startswith("deploy"))


def test_the_list_of_shells_names_files_that_exist() -> None:
    assert set(map(name_of, sources())) >= SHELLS


def violations(path: Path, source: str) -> list[str]:
    """Imports of `source`, standing at `path`, that go up."""
    layer = LAYERS.index(path.relative_to(ROOT).parts[0])
    higher = set(LAYERS[layer + 1 :])
    return sorted(top(imports(ast.parse(source))) & higher)


def test_calls_go_down() -> None:
    found = {name_of(path): up for path in sources() if (up := violations(path, path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "planted", ["import cluster.coordination.view", "from deploy import config", "def f():\n import cluster"]
)
def test_an_import_that_goes_up_is_seen(planted: str) -> None:
    assert violations(ROOT / "workers" / "x.py", planted)


def ringed(modules: Mapping[str, ast.Module]) -> set[str]:
    """Those of `modules` that import each other in a ring, or stand on one. An import inside a function counts: it may
    put off loading something heavy, but not hide that two files need each other."""
    graph = {
        # A package's own parts may be imported by it.
        name: {other for other in imports(tree) & set(modules) if other != name and not other.startswith(f"{name}.")}
        for name, tree in modules.items()
    }
    done: set[str] = set()
    while ready := {name for name in graph if name not in done and graph[name] <= done}:
        done |= ready
    return set(graph) - done


def test_no_ring_of_imports() -> None:
    assert not ringed({name_of(path): tree_of(path) for path in sources()})


@pytest.mark.parametrize(
    "planted",
    [
        "from workers import a",
        "def f():\n from workers.a import g",
        "class C:\n async def f(self):\n  import workers.a",
        "if TYPE_CHECKING:\n from workers.a import g",
    ],
)
def test_a_ring_is_seen_however_late_it_closes(planted: str) -> None:
    above = {"workers.a": ast.parse("from workers import b"), "workers.c": ast.parse("def f():\n import workers.a")}
    assert ringed(above | {"workers.b": ast.parse(planted)}) == {"workers.a", "workers.b", "workers.c"}
    assert not ringed(above | {"workers.b": ast.parse("def f():\n import torch")})


@pytest.mark.parametrize("module", PURE)
def test_a_pure_file_loads_neither_torch_nor_ray_and_reads_no_clock(module: str) -> None:
    loaded = top(imports(tree_of(path_of(module))))
    assert not loaded & (HEAVY | CLOCKS)


@pytest.mark.parametrize(
    ("modules", "banned"),
    [
        (PURE, {"torch", "ray", "transformers", "numpy"}),
        (TEXT, {"torch", "ray", "transformers"}),
        (CONFIG, {"torch", "ray", "transformers"}),
    ],
    ids=["pure core", "text of the ingress", "config and bench"],
)
def test_what_a_fresh_interpreter_loads(modules: tuple[str, ...], banned: set[str]) -> None:
    program = f"import sys, json\nfor m in {modules!r}: __import__(m)\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not top(set(json.loads(done.stdout))) & banned


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that read environment variables; writing them (for a child, before a library loads) is allowed."""
    lines = []
    written = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            written.add(id(node.value))
        if isinstance(node, ast.Attribute) and node.attr == "update":
            written.add(id(node.value))
    for node in ast.walk(tree):
        is_environ = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
        if is_environ and id(node) not in written:
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in ("environ", "getenv")]
    return lines


def test_only_config_reads_the_environment() -> None:
    found = {name_of(path): lines for path in sources() if (lines := environment_reads(tree_of(path)))}
    assert set(found) == {"deploy.config"}


def test_environment_reads_are_told_from_writes() -> None:
    reads = "os.environ['A']\nos.getenv('A')\nos.environ.get('A')\n"
    writes = "os.environ['A'] = 'x'\nos.environ.update(A='x')\n"
    assert environment_reads(ast.parse(reads + writes)) == [1, 2, 3]


def waits_in_async(tree: ast.AST) -> list[int]:
    """Lines inside an async def where ray.get or ray.wait would block the event loop."""
    lines = []
    for function in ast.walk(tree):
        if isinstance(function, ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("ray.get", "ray.wait"):
                    lines.append(node.lineno)
    return lines


def test_no_ray_get_inside_async_def() -> None:
    found = {name_of(path): lines for path in sources() if (lines := waits_in_async(tree_of(path)))}
    assert not found
    assert waits_in_async(ast.parse("async def f():\n ray.get(x)")) == [2]


def test_names_say_something() -> None:
    empty = {"util", "utils", "helper", "helpers", "common", "base", "manager", "misc"}
    assert not [path for path in sources() if empty & set(path.stem.split("_"))]


def test_every_module_says_what_it_is() -> None:
    assert not [name_of(path) for path in sources() if path.read_text() and not ast.get_docstring(tree_of(path))]
