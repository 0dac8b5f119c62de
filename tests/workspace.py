"""The packages of the workspace, and which of them depend on which, as `cargo metadata` describes them."""

import dataclasses
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Files and folders of no package, and the packages whose unit tests read them.
READERS = {
    "README.md": {"xtrain"},
    "docs/": {"xtrain", "xtrain-config", "xtrain-planner"},
    "examples/": {"xtrain-config", "xtrain-planner"},
    "tests/chat/": {"xtrain-chat"},
    "tests/fragments.rs": {"xtrain-report"},
    "tests/messages.rs": {"xtrain-config", "xtrain-data", "xtrain-distributed", "xtrain-ops", "xtrain-report"},
}


@dataclasses.dataclass(frozen=True)
class Package:
    name: str
    folder: str  # relative to the root
    uses: frozenset = frozenset()  # packages of the workspace that its library or its binaries need
    tests_use: frozenset = frozenset()  # those that only its tests need


def read():
    """All packages, by name."""
    command = ["cargo", "metadata", "--no-deps", "--locked", "--format-version=1"]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return parse(json.loads(text), ROOT)


def parse(metadata, root):
    names = {package["name"] for package in metadata["packages"]}
    packages = {}
    for package in metadata["packages"]:
        name, kinds = package["name"], {True: set(), False: set()}
        for dependency in package["dependencies"]:
            if dependency["name"] in names - {name}:
                kinds[dependency["kind"] == "dev"].add(dependency["name"])
        folder = pathlib.Path(package["manifest_path"]).parent.relative_to(root).as_posix()
        packages[name] = Package(name, folder, frozenset(kinds[False]), frozenset(kinds[True]))
    return packages


def libraries(packages, names):
    """These packages and all that their libraries are built from."""
    found, left = set(), set(names)
    while left:
        name = left.pop()
        found.add(name)
        left |= packages[name].uses - found
    return found


def tested_with(packages, name):
    """The package and all that its tests are built from."""
    return libraries(packages, {name} | packages[name].tests_use)


def above(packages, changed):
    """The packages whose tests are built from a changed one, these included."""
    return {name for name in packages if tested_with(packages, name) & set(changed)}


def owner(packages, path):
    """The package that the file belongs to; None for files of no package."""
    return next((p.name for p in packages.values() if path.startswith(p.folder + "/")), None)


def readers(path):
    """The packages whose unit tests read a file of no package."""
    return set().union(*(names for read, names in READERS.items() if path.startswith(read)))
