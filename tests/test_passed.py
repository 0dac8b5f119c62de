"""Which changes make CI repeat a whole test: `python3 tests/test_passed.py`."""

import contextlib
import io
import pathlib
import re
import tempfile
import tomllib
import unittest

import passed
import workspace


RUN = """steps=(format:20 kernels:500:5 races:150:50)
format() {
    cargo fmt
}
kernels() {
    if [ -z "$gpu_form" ]; then
        tests/emulated/run.sh kernels
    fi
}
races() {
    # Slow.
    tests/emulated/run.sh races
}
"""


class Rule(unittest.TestCase):
    """A workspace of four packages: `ops` is built from `tensor` and tested with `runtime`; nothing of these needs `report`."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.packages = {
            "tensor": workspace.Package("tensor", "crates/tensor"),
            "runtime": workspace.Package("runtime", "crates/runtime", frozenset({"tensor"})),
            "ops": workspace.Package("ops", "crates/ops", frozenset({"tensor"}), frozenset({"runtime"})),
            "report": workspace.Package("report", "crates/report", frozenset({"tensor"})),
        }
        for name in self.packages:
            for path in ("src/lib.rs", "tests/it.rs", "Cargo.toml", "README.md"):
                self.put(f"crates/{name}/{path}")
        for path in ("Cargo.lock", "Cargo.toml", "tests/emulated/run.py", "tests/emulated/README.md"):
            self.put(path)
        self.put(".ci/run", RUN)
        self.kernels = passed.LongTest(steps=("kernels", "races"), tested=("ops",), paths=("tests/emulated",))
        self.exchange = passed.LongTest(libraries=("ops",))

    def digest(self, test, compiler="rustc 1"):
        return passed.digest(self.root, self.packages, test, compiler)

    def put(self, path, content="1"):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def changes(self, test, path):
        """True if a change of the file changes the test's hash."""
        before = self.digest(test)
        self.put(path, "2")
        after = self.digest(test)
        self.put(path)
        self.assertEqual(before, self.digest(test))
        return before != after

    def test_what_a_test_is_built_from_makes_it_run_whole(self):
        for path in ("crates/ops/src/lib.rs", "crates/tensor/src/lib.rs", "crates/tensor/Cargo.toml", "Cargo.lock", "Cargo.toml"):
            self.assertTrue(self.changes(self.kernels, path), path)
            self.assertTrue(self.changes(self.exchange, path), path)

    def test_tests_and_what_they_use_count_for_a_tested_package_alone(self):
        for path in ("crates/ops/tests/it.rs", "crates/runtime/src/lib.rs", "tests/emulated/run.py"):
            self.assertTrue(self.changes(self.kernels, path), path)
            self.assertFalse(self.changes(self.exchange, path), path)

    def test_other_packages_tests_of_a_library_and_pages_do_not_count(self):
        for path in ("crates/report/src/lib.rs", "crates/tensor/tests/it.rs", "crates/ops/README.md", "tests/emulated/README.md"):
            self.assertFalse(self.changes(self.kernels, path), path)

    def test_new_renamed_and_removed_files_count(self):
        before = self.digest(self.kernels)
        self.put("crates/ops/src/new.cu")
        added = self.digest(self.kernels)
        (self.root / "crates/ops/src/new.cu").rename(self.root / "crates/ops/src/other.cu")
        renamed = self.digest(self.kernels)
        (self.root / "crates/ops/src/other.cu").unlink()
        self.assertEqual(len({before, added, renamed}), 3)
        self.assertEqual(before, self.digest(self.kernels))

    def test_the_commands_of_its_steps_count_but_not_those_of_others_budgets_and_comments(self):
        before = self.digest(self.kernels)
        for old, new, counts in [
            ("run.sh kernels", "run.sh kernels --all", True),
            ("run.sh races", "run.sh races --all", True),
            ("cargo fmt", "cargo fmt --all", False),
            ("# Slow.", "# Very slow.", False),
            (":500:", ":400:", False),
        ]:
            self.put(".ci/run", RUN.replace(old, new))
            self.assertEqual(self.digest(self.kernels) != before, counts, new)
        self.put(".ci/run", RUN.replace("races()", "race()"))
        with self.assertRaises(SystemExit):
            self.digest(self.kernels)

    def test_another_compiler_counts(self):
        self.assertNotEqual(self.digest(self.kernels), self.digest(self.kernels, "rustc 2"))

    def test_a_run_is_recorded_if_all_its_steps_have_run(self):
        self.assertIsNone(passed.why_not(self.kernels, {"kernels": 200, "races": 150, "format": 0}))
        self.assertIn("races", passed.why_not(self.kernels, {"kernels": 200}))
        self.assertIn("kernels", passed.why_not(self.kernels, {"kernels": 0, "races": 150}))
        self.assertIsNone(passed.why_not(passed.LongTest(steps=("build", "exchange")), {"build": 0, "exchange": 100}))

    def test_a_path_that_is_gone_is_an_error(self):
        with self.assertRaises(SystemExit):
            self.digest(passed.LongTest(paths=("tests/gone",)))

    def test_a_record_of_one_test_leaves_the_others(self):
        record = self.root / "passed.toml"
        self.assertEqual(passed.read(record), {})
        passed.write(record, "gpu", "a")
        passed.write(record, "exchange", "b")
        passed.write(record, "gpu", "c")
        self.assertEqual(passed.read(record), {"exchange": "b", "gpu": "c"})

    def test_the_packages_above_a_change_are_those_that_are_tested_with_it(self):
        self.assertEqual(workspace.above(self.packages, {"runtime"}), {"runtime", "ops"})
        self.assertEqual(workspace.above(self.packages, {"tensor"}), set(self.packages))
        self.assertEqual(workspace.above(self.packages, {"report"}), {"report"})


class Arguments(unittest.TestCase):
    def test_wrong_arguments_print_the_usage_and_end_with_2(self):
        hash = "0" * 64
        for arguments in ("", "form", "form tpu", "hash gpu more", "record gpu", "record gpu 12 races=1", f"record gpu {hash} races", "keep gpu"):
            said = io.StringIO()
            with contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as ended:
                passed.main(arguments.split())
            self.assertEqual(ended.exception.code, 2, arguments)
            self.assertTrue(said.getvalue().startswith("usage: "), arguments)


class Repository(unittest.TestCase):
    """The tests that CI repeats, in this repository."""

    @classmethod
    def setUpClass(cls):
        cls.packages = workspace.read()
        files = {name: passed.inputs(workspace.ROOT, cls.packages, test) for name, test in passed.LONG_TESTS.items()}
        cls.inputs = {name: {file.relative_to(workspace.ROOT).as_posix() for file in found} for name, found in files.items()}

    def test_kernels_and_the_engine_count_for_the_emulated_gpu(self):
        inputs = self.inputs["gpu"]
        for path in ("crates/ops/src/swiglu/kernel.cu", "crates/cuda/src/lib.rs", "crates/runtime/src/lib.rs", "crates/emulator/src/lib.rs"):
            self.assertIn(path, inputs)
        self.assertFalse({path for path in inputs if path.startswith(("crates/report/", "crates/config/", "crates/train/", "crates/xtrain/"))})

    def test_all_that_trains_and_exports_counts_for_the_exchange(self):
        inputs = self.inputs["exchange"]
        for path in (
            *("crates/model/src/lib.rs", "crates/checkpoint/src/lib.rs", "crates/train/src/exchange.rs", "crates/train/src/run/finish.rs"),
            *("crates/step/src/weights.rs", "crates/planner/src/hf_names.rs", "crates/config/src/lib.rs", "crates/runtime/src/cpu.rs"),
            *("crates/xtrain/src/commands/train.rs", "tests/exchange/run.py", "tests/exchange/requirements.txt"),
        ):
            self.assertIn(path, inputs)
        self.assertFalse({path for path in inputs if path.startswith(("crates/lab/", "crates/emulator/", "crates/model/tests/"))})

    def test_files_that_the_runs_of_the_exchange_name_count(self):
        named = set()
        for file in sorted((workspace.ROOT / "tests/exchange/models").glob("*.toml")):
            named |= {value for value in tomllib.loads(file.read_text())["data"].values() if isinstance(value, str) and "/" in value}
        self.assertTrue(named)
        self.assertFalse(named - self.inputs["exchange"])

    def test_each_step_is_one_of_ci(self):
        for test in passed.LONG_TESTS.values():
            for step in test.steps:
                self.assertTrue(passed.commands(workspace.ROOT, step).strip(), step)

    def test_files_of_no_package_are_listed_with_the_packages_whose_unit_tests_read_them(self):
        # Attributes, macros and paths of a test: `#[path = "../../../tests/a.rs"]`, `.join("../../docs")`, `repository().join("examples")`.
        outside = re.compile(r'(?:path = "|include\w*!\("|[jJ]oin\("|, "/)(?:\.\./)*((?:README.md|docs|examples|benches|tests/)[\w./-]*)"')
        found = {name: set() for name in workspace.READERS}
        for package in self.packages.values():
            for file in sorted((workspace.ROOT / package.folder / "src").rglob("*.rs")):
                for path in outside.findall(file.read_text()):
                    # A package may have a folder of the same name.
                    if not (workspace.ROOT / package.folder / path).exists() and (workspace.ROOT / path).exists():
                        listed = [name for name in found if f"{path}/".startswith(name) or path == name]
                        self.assertTrue(listed, f"{file} reads {path}: list it in workspace.READERS")
                        found[listed[0]].add(package.name)
        self.assertEqual(found, workspace.READERS)

    def test_the_version_of_nvrtc_counts(self):
        self.assertIn("tests/nvrtc.sh", self.inputs["gpu"])


if __name__ == "__main__":
    unittest.main()
