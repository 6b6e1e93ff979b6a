"""Imports point downwards only: bytes below ids, the command line on top.

The imports are read from the source (``ast`` for Python, statements for Cython, ``cimport`` and
type-only imports included), so that one made inside a function counts too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pagedcache"

# Lowest first. A module belongs to the layer with its longest matching prefix; a new module must
# be given a layer here. "" is the package itself: importing it means importing the façade.
LAYERS: list[tuple[str, set[str]]] = [
    ("errors", {"_version", "errors"}),
    ("plain values", {"arguments", "guards", "sizes", "stats"}),
    ("native", {"_native"}),
    ("formats", {"formats"}),
    ("array exchange", {"dlpack", "foreign"}),
    (
        "values",
        {"arithmetic", "arrays", "hashing", "machine", "placement", "prefix_hasher", "spec"},
    ),
    ("CUDA runtime", {"_cuda"}),
    ("bodies", {"bookkeeping", "prefix_cache", "storage"}),
    (
        "façade",
        {
            "", "admission", "attention", "batches", "cache", "door", "handles", "ids", "movers",
            "ordering", "plain", "pointers", "reading", "sequence", "upkeep", "views",
        },
    ),
    ("integrations", {"integrations"}),
    ("checks", {"checks"}),
    ("command line", {"__main__", "cli"}),
]
RANK = {prefix: rank for rank, (_, prefixes) in enumerate(LAYERS) for prefix in prefixes}

# What a side must not reach, not even through others: ids know no bytes, bytes know no ids.
NEVER_REACHED = {
    "bookkeeping": {"spec", "formats", "arithmetic", "placement", "storage", "_native.rows"},
    "storage": {"bookkeeping", "hashing", "prefix_hasher", "prefix_cache", "stats"},
    "formats": {"spec", "storage", "bookkeeping"},
    "_cuda": {"spec", "storage", "bookkeeping"},
}

CYTHON_IMPORT = re.compile(
    r"^\s*(?:from\s+(?P<base>[\w.]+)\s+c?import\s+(?P<names>\([^)]*\)|[^\n]*)"
    r"|c?import\s+(?P<modules>[^\n]*))",
    re.MULTILINE,
)


def module_name(path: Path) -> str:
    """Dotted name below the package: ``cache``, ``storage.cpu``, ``""`` for the package."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = sorted(
    path for pattern in ("*.py", "*.pyx", "*.pxd", "*.pyi") for path in PACKAGE.rglob(pattern)
)
MODULES = {module_name(path) for path in SOURCES}


def python_imports(text: str, module: str, is_package: bool) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["pagedcache", *filter(None, module.split("."))]
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *filter(None, [base])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def cython_imports(text: str) -> set[str]:
    text = re.sub(r'"""[\s\S]*?"""', "", text)
    text = re.sub(r"#[^\n]*", "", text)
    found = set()
    for match in CYTHON_IMPORT.finditer(text):
        names = (match["names"] or match["modules"] or "").strip("()")
        words = [name.split()[0] for name in names.split(",") if name.strip()]
        found |= {f"{match['base']}.{word}" if match["base"] else word for word in words}
    return found


def imported_modules(path: Path) -> set[str]:
    """Modules of this package that the file imports, as names below the package."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".pyx", ".pxd"):
        names = cython_imports(text)
    else:
        names = python_imports(text, module_name(path), path.stem == "__init__")
    found = set()
    for name in names:
        if name != "pagedcache" and not name.startswith("pagedcache."):
            continue
        below = name.removeprefix("pagedcache").removeprefix(".")
        while below and below not in MODULES:  # "formats.FORMATS" names a thing inside a module
            below = below.rpartition(".")[0]
        found.add(below)
    return found - {module_name(path)}


def rank(module: str) -> int:
    prefix = module
    while prefix and prefix not in RANK:
        prefix = prefix.rpartition(".")[0]
    # A new module must not pass as the package itself.
    assert prefix or not module, f"{module}: no layer; add it to LAYERS in {Path(__file__).name}"
    return RANK[prefix]


GRAPH: dict[str, set[str]] = {module: set() for module in MODULES}
for source in SOURCES:
    GRAPH[module_name(source)] |= imported_modules(source)


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_point_downwards(module: str) -> None:
    upward = {target for target in GRAPH[module] if rank(target) > rank(module)}
    names = [name for name, _ in LAYERS]
    assert not upward, (
        f"{module} ({names[rank(module)]}) imports upwards: "
        + ", ".join(f"{target} ({names[rank(target)]})" for target in sorted(upward))
    )


@pytest.mark.parametrize("start", sorted(NEVER_REACHED))
def test_sides_do_not_reach_each_other(start: str) -> None:
    reached: set[str] = set()
    queue = [module for module in GRAPH if f"{module}.".startswith(f"{start}.")]
    assert queue, f"there is no module {start}"
    while queue:
        module = queue.pop()
        if module not in reached:
            reached.add(module)
            queue.extend(GRAPH[module])
    for forbidden in NEVER_REACHED[start]:
        hits = {module for module in reached if f"{module}.".startswith(f"{forbidden}.")}
        assert not hits, f"{start} reaches {sorted(hits)}"


def test_no_module_needs_a_framework_to_be_imported() -> None:
    """Frameworks, plotting, progress bars and test tools are imported where they are used.

    A module below ``integrations/<library>/`` is a tie to that library and loads it."""
    banned = {"torch", "pycuda", "cupy", "cuda", "matplotlib", "gguf", "hypothesis", "pytest"}
    banned |= {"tqdm", "transformers"}
    for path in SOURCES:
        if path.suffix != ".py" or path.stem.endswith("_peer"):  # loaded where the peer is there
            continue
        if module_name(path).startswith("integrations.transformers"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = {alias.name for alias in getattr(node, "names", [])}
            if isinstance(node, ast.ImportFrom):
                names = {node.module or ""}
            if isinstance(node, ast.Import | ast.ImportFrom):
                tops = {name.partition(".")[0] for name in names}
                assert not tops & banned, f"{module_name(path)} imports {tops & banned}"


def test_the_reader_sees_what_it_must(tmp_path: Path) -> None:
    """The judge itself: upward imports in every spelling are seen."""
    python = "import pagedcache.cache\ndef f():\n    from pagedcache import sequence as s\n"
    assert python_imports(python, "errors", False) == {"pagedcache.cache", "pagedcache.sequence"}
    relative = "from . import rows\nfrom ..spec import CacheSpec\n"
    assert python_imports(relative, "_native.x", False) == {
        "pagedcache._native.rows",
        "pagedcache.spec.CacheSpec",
    }
    assert python_imports("from .cpu import A\n", "storage", True) == {"pagedcache.storage.cpu.A"}
    cython = (
        '"""import nothing"""\n'
        "from pagedcache.bookkeeping.types cimport (\n    pool_t,  # a, b\n    pin_t,\n)\n"
        "cimport pagedcache.spec as s, numpy\n"
        "    import pagedcache.cli\n"
        "# import pagedcache.cache\n"
    )
    assert cython_imports(cython) == {
        "pagedcache.bookkeeping.types.pool_t",
        "pagedcache.bookkeeping.types.pin_t",
        "pagedcache.spec",
        "numpy",
        "pagedcache.cli",
    }
