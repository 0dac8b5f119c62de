"""Which changes make CI repeat a whole test: `python3 tests/test_passed.py`."""

import pathlib
import tempfile
import unittest

import passed
import workspace


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
        self.kernels = passed.LongTest(tested=("ops",), paths=("tests/emulated",))
        self.exchange = passed.LongTest(libraries=("ops",))

    def put(self, path, content="1"):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def changes(self, test, path):
        """True if a change of the file changes the test's hash."""
        before = passed.digest(self.root, self.packages, test)
        self.put(path, "2")
        after = passed.digest(self.root, self.packages, test)
        self.put(path)
        self.assertEqual(before, passed.digest(self.root, self.packages, test))
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
        before = passed.digest(self.root, self.packages, self.kernels)
        self.put("crates/ops/src/new.cu")
        added = passed.digest(self.root, self.packages, self.kernels)
        (self.root / "crates/ops/src/new.cu").rename(self.root / "crates/ops/src/other.cu")
        renamed = passed.digest(self.root, self.packages, self.kernels)
        (self.root / "crates/ops/src/other.cu").unlink()
        self.assertEqual(len({before, added, renamed}), 3)
        self.assertEqual(before, passed.digest(self.root, self.packages, self.kernels))

    def test_a_path_that_is_gone_is_an_error(self):
        with self.assertRaises(SystemExit):
            passed.digest(self.root, self.packages, passed.LongTest(paths=("tests/gone",)))

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


class Repository(unittest.TestCase):
    """The tests that CI repeats, in this repository."""

    @classmethod
    def setUpClass(cls):
        packages = workspace.read()
        files = {name: passed.inputs(workspace.ROOT, packages, test) for name, test in passed.LONG_TESTS.items()}
        cls.inputs = {name: {file.relative_to(workspace.ROOT).as_posix() for file in found} for name, found in files.items()}

    def test_kernels_and_the_engine_count_for_the_emulated_gpu(self):
        inputs = self.inputs["gpu"]
        for path in ("crates/ops/src/swiglu/kernel.cu", "crates/cuda/src/lib.rs", "crates/runtime/src/lib.rs", "crates/emulator/src/lib.rs"):
            self.assertIn(path, inputs)
        self.assertFalse({path for path in inputs if path.startswith(("crates/report/", "crates/config/", "crates/train/", "crates/xtrain/"))})

    def test_what_an_export_contains_counts_for_the_exchange(self):
        inputs = self.inputs["exchange"]
        for path in ("crates/model/src/lib.rs", "crates/checkpoint/src/lib.rs", "crates/train/src/exchange.rs", "tests/exchange/run.py"):
            self.assertIn(path, inputs)
        self.assertFalse({path for path in inputs if path.startswith(("crates/report/", "crates/config/"))})


if __name__ == "__main__":
    unittest.main()
