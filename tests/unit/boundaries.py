"""Who may include whom: the table of folders, held against every #include line. Prints what breaks it."""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# folder: folders and files whose headers it may include
MAY_INCLUDE = {
    "kernels": ["kernels"],
    "kernels/cpu": ["kernels/cpu", "kernels"],
    "kernels/cuda": ["kernels/cuda", "kernels"],
    "model": ["model", "kernels/backend.h", "kernels/base.h", "kernels/dtype.h"],
    "kvstore": ["kvstore", "kernels/backend.h", "kernels/base.h"],
    "tools": ["tools", "model", "kernels"],
    "tools/probe": ["tools/probe", "tools", "model", "kernels"],
    "tools/bench": ["tools/bench", "tools", "model", "kvstore", "kernels"],
    "daemon": ["daemon", "kvstore", "model", "kernels"],
    "client": ["client"],
}
# third-party header: where it may be included
THIRD_PARTY = {
    r"utf8proc\.h": ["model"],
    r"jansson\.h": ["model", "client/cli.h"],
    r"liburing\.h": ["kvstore/disk_uring.c", "tools/bench/tape.c"],
    r"xxhash\.h": ["kvstore/digest.c", "kvstore/format.c"],
    r"openssl/.*": ["kvstore/key.c"],
    r"uv\.h": ["daemon"],
    r"msgpack.*": ["daemon", "client"],
    r"spillway_client\.h": ["client/example.c", "tools/bench"],
    r"cuda.*|cublas.*|mma\.h": ["kernels/cuda"],
}
SYSTEM = re.compile(
    r"(assert|ctype|dirent|endian|errno|fcntl|fenv|float|getopt|inttypes|limits|locale|malloc|math|poll|pthread|sched"
    r"|semaphore|signal|stdalign|stdarg|stdatomic|stdbool|stddef|stdint|stdio|stdlib|stdnoreturn|string|strings"
    r"|threads|time|unistd|cpuid|immintrin|x86intrin|(sys|linux)/\w+)\.h"
)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


def within(path, places):
    """A place is a file, or a folder without its subfolders."""
    return any(path == place or str(Path(path).parent) == place for place in places)


def resolve(source, name):
    """The file that a quoted include means: beside the source, else in one of the include folders."""
    for folder in [source.parent] + [ROOT / top for top in ("", "kernels", "model", "kvstore", "tools")]:
        if (folder / name).is_file():
            return str((folder / name).resolve().relative_to(ROOT))
    return None


def complaints(source):
    path = str(source.relative_to(ROOT))
    folder = str(Path(path).parent)
    if folder not in MAY_INCLUDE:
        yield f"{path}: the folder {folder} is not in the table of tests/unit/boundaries.py"
        return
    for quote, name in INCLUDE.findall(source.read_text()):
        if quote == '"':
            target = resolve(source, name)
            if target is None:
                yield f'{path}: "{name}" is not found in the tree'
            elif not within(target, MAY_INCLUDE[folder]):
                yield f"{path} may not include {target}"
        elif not SYSTEM.fullmatch(name):
            places = [p for pattern, where in THIRD_PARTY.items() if re.fullmatch(pattern, name) for p in where]
            if not within(path, places):
                yield f"{path} may not include <{name}>"


def main():
    tops = {folder.split("/")[0] for folder in MAY_INCLUDE}
    sources = [p for top in sorted(tops) for p in sorted((ROOT / top).rglob("*")) if p.suffix in (".c", ".h", ".cu", ".cuh")]
    found = [line for source in sources for line in complaints(source)]
    print("\n".join(found) or f"{len(sources)} files keep to the table")
    return 1 if found or not sources else 0


sys.exit(main())
