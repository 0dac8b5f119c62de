"""PTX of the kernels that a commit's own test compiles, in a form that names do not change."""

import concurrent.futures
import ctypes
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent


def digest(text):
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()


def write(file, content):
    """Writes a file that is complete or absent."""
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(content)
    os.rename(temporary.name, file)


# The form in which kernels are compared: a change of this file compares all anew.
FORM = digest(pathlib.Path(__file__).read_bytes())[:16]
# Options that leave PTX as it is, or whose effect is in the PTX. All others are compared.
IGNORED = re.compile("-D.*|--gpu-architecture=.*|--ptxas-options=-v|-lineinfo|--generate-line-info")


@dataclasses.dataclass(frozen=True)
class Compile:
    """One call of the compiler."""

    name: str
    source: str
    options: tuple[str, ...]

    @property
    def arch(self):
        return next(o.split("=", 1)[1] for o in self.options if o.startswith("--gpu-architecture="))

    @property
    def variant(self):
        """The source's name and the macros that the variant defines."""
        macros = [option[2:] for option in self.options if option.startswith("-D")]
        return " ".join([self.name, *macros])

    @property
    def others(self):
        return sorted(option for option in self.options if not IGNORED.fullmatch(option))


def recorded(command, folder, environment):
    """The compiles that `command` asks for: it runs with the recorder in place of NVRTC."""
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        library = scratch / "lib" / "libnvrtc.so.13"
        records = scratch / "records"
        library.parent.mkdir()
        records.mkdir()
        subprocess.run(
            [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", library, HERE / "recorder.c"], check=True
        )
        variables = {"XTRAIN_CUDA_LIBRARIES": str(library.parent), "SAME_BITS_RECORD": str(records)}
        subprocess.run(command, cwd=folder, env=environment | variables, check=True, stdout=subprocess.DEVNULL)
        compiles = []
        for file in records.iterdir():
            name, source, *options = file.read_text().split("\0")[:-1]
            compiles.append(Compile(name, source, tuple(options)))
    if not compiles:
        raise SystemExit(f"{' '.join(command)} compiled no kernel")
    return sorted(compiles, key=lambda c: (c.variant, c.arch))


class Nvrtc:
    """NVRTC, with a folder of the PTX that it has compiled."""

    def __init__(self, path, folder):
        # NVRTC opens this one by its name, and finds it if it is open already.
        for builtins in pathlib.Path(path).parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.version = digest(pathlib.Path(path).read_bytes())

    def key(self, compile):
        """The hash of all that decides the PTX of one compile."""
        return digest("\0".join([self.version, compile.source, *virtual(compile.options)]))

    def ptx(self, compile):
        """The PTX of one compile, without line information, for the virtual architecture of its target."""
        file = self.folder / f"{self.key(compile)}.ptx.gz"
        if not file.exists():
            write(file, gzip.compress(self.compiled(compile, virtual(compile.options)), mtime=0))
            fields = json.dumps(dataclasses.asdict(compile))
            write(self.folder / f"{self.key(compile)}.compile.gz", gzip.compress(fields.encode(), mtime=0))
        return gzip.decompress(file.read_bytes()).decode()

    def hashes(self, compile):
        """The hash of each kernel's text, by the kernel's name."""
        file = self.folder / f"{self.key(compile)}.{FORM}.json"
        if not file.exists():
            hashes = {name: digest(text) for name, text in kernels(self.ptx(compile)).items()}
            write(file, json.dumps(hashes).encode())
        return json.loads(file.read_text())

    def compiled(self, compile, options):
        call = self.library
        program = ctypes.c_void_p()
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        arguments = (compile.source.encode(), compile.name.encode(), 0, None, None)
        check(call.nvrtcCreateProgram(ctypes.byref(program), *arguments), compile, "")
        status = call.nvrtcCompileProgram(program, len(options), array)
        check(status, compile, self.text(program, "ProgramLog").decode())
        ptx = self.text(program, "PTX")
        call.nvrtcDestroyProgram(ctypes.byref(program))
        return ptx.rstrip(b"\0")

    def text(self, program, what):
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


def virtual(options):
    """The options for PTX: for a virtual architecture, without line information and ptxas's options."""
    left = [o for o in options if not re.fullmatch("--ptxas-options=.*|-lineinfo|--generate-line-info", o)]
    return [o.replace("--gpu-architecture=sm_", "--gpu-architecture=compute_") for o in left]


def check(status, compile, log):
    if status != 0:
        raise SystemExit(f"{compile.variant} {compile.arch}: NVRTC returned {status}\n{log}")


# A comment, a string, a word (name, directive, instruction or register), a number, or one other character.
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\]|\\.)*"|[.%]?[A-Za-z_$][\w$.]*|\.?\d[\w.]*|\S', re.DOTALL)
NAME = re.compile(r"[A-Za-z_$][\w$]*")
# Words without a dot or a percent sign that are PTX's own, beside instructions.
WORDS = {"generic", "mask", "WARP_SZ", "_"}


def tokens(ptx):
    """The tokens of a module but for comments, each with whether it is a name."""
    found = []
    # The tokens of the statement so far. Its first word is the instruction; in `@%p1 bra`, the first after
    # the predicate.
    statement = []
    for match in TOKEN.finditer(ptx):
        token = match.group()
        if token.startswith(("//", "/*")):
            continue
        if NAME.match(token):
            first = not statement or (statement[0] == "@" and len(statement) == (3 if "!" in statement else 2))
            label = not statement and ptx[match.end() : match.end() + 1] == ":"
            if first and not label:
                found.append((token, False))
            else:
                # A vector's element: `name.x`.
                name, dot, rest = token.partition(".")
                found.append((name, name not in WORDS))
                if dot:
                    found.append((dot + rest, False))
        else:
            found.append((token, False))
        statement.append(token)
        # A brace begins or ends a block, or it is a part of a statement: `mov.b64 {low, high}, %rd1;`.
        block = statement[0] in "{}" or any(t in (".entry", ".func") for t in statement[:4])
        if token == ";" or (token in "{}" and block) or (token == ":" and len(statement) == 2):
            statement = []
    return found


def items(found):
    """The module's functions and variables, each a list of tokens."""
    item, depth, all_items = [], 0, []
    skipped = {".version": 2, ".target": None, ".address_size": 2}
    position = 0
    while position < len(found):
        token = found[position][0]
        if not item and token in skipped:
            position += 2
            # `.target sm_90a, debug`
            while token == ".target" and found[position][0] == ",":
                position += 2
            continue
        item.append(found[position])
        depth += (token in "{(") - (token in "})")
        function = any(t in (".entry", ".func") for t, _ in item[:4])
        if depth == 0 and (token == ";" or (token == "}" and function)):
            all_items.append(item)
            item = []
        position += 1
    if item or depth:
        raise SystemExit(f"cannot read this PTX from {' '.join(t for t, _ in item[:20])}")
    return all_items


def declared(item):
    """The name that an item declares."""
    depth = 0
    for token, is_name in item:
        depth += (token in "({") - (token in ")}")
        if is_name and depth == 0:
            return token
    raise SystemExit(f"no name is declared in {' '.join(t for t, _ in item[:20])}")


def kernels(ptx):
    """The module's kernels: from each name to its normalised text.

    The text is the kernel, then the functions and variables that it uses, in the order of their first use, one
    statement a line. Names are numbered in the order of their first appearance.
    """
    all_items = items(tokens(ptx))
    by_name = {}
    for item in all_items:
        # A function may be declared before it is defined.
        by_name.setdefault(declared(item), []).append(item)
    texts = {}
    for item in all_items:
        if not any(token == ".entry" for token, _ in item[:3]):
            continue
        numbers, queue, lines = {}, [declared(item)], []
        seen = set(queue)
        while queue:
            for part in by_name[queue.pop(0)]:
                line = []
                for token, is_name in part:
                    if is_name:
                        if token in by_name and token not in seen:
                            seen.add(token)
                            queue.append(token)
                        token = f"n{numbers.setdefault(token, len(numbers))}"
                    line.append(token)
                    if token == ";":
                        lines.append(" ".join(line))
                        line = []
                lines.append(" ".join(line))
        texts[declared(item)] = "\n".join(line for line in lines if line)
    return texts


def compiled_kernels(compiles, library, folder, jobs):
    """The entries of a recording, one a compile."""
    pool = concurrent.futures.ProcessPoolExecutor(jobs, initializer=open_library, initargs=(library, folder))
    with pool:
        return list(pool.map(compiled_kernel, compiles, chunksize=4))


def open_library(library, folder):
    global nvrtc
    nvrtc = Nvrtc(library, folder)


def compiled_kernel(compile):
    hashes = nvrtc.hashes(compile)
    return {
        "variant": compile.variant,
        "arch": compile.arch,
        "options": compile.others,
        "ptx": nvrtc.key(compile),
        "kernels": hashes,
    }


def compiled_again(library, folder, key):
    """The texts of a recorded compile's kernels, from a new process.

    NVRTC's output depends on where the system puts its memory: for some large kernels it orders a few
    instructions differently in each process.
    """
    command = [sys.executable, pathlib.Path(__file__), library, folder / f"{key}.compile.gz"]
    return kernels(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    """Prints the PTX of one recorded compile."""
    library, file = map(pathlib.Path, sys.argv[1:])
    compile = Compile(**json.loads(gzip.decompress(file.read_bytes())))
    print(Nvrtc(library, file.parent).compiled(compile, virtual(compile.options)).decode())


def text(folder, entry, kernel):
    """The normalised text of a kernel of a recording."""
    ptx = gzip.decompress((folder / f"{entry['ptx']}.ptx.gz").read_bytes()).decode()
    return kernels(ptx)[kernel]


if __name__ == "__main__":
    main()
