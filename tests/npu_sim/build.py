"""Builds the simulated device library for a `torch_npu` wheel: `python build.py WHEEL OUT`.

WHEEL is the folder that holds the package `torch_npu`, OUT the folder for the libraries. What the wheel's own libraries
need of the device library and the sources here do not define becomes a function that does nothing and returns 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "runtime.cpp", "graphs.cpp")
COMPILER = ("g++", "-std=c++17", "-O2", "-fPIC", "-Wall", "-Wno-unknown-pragmas")
#: Looked up at run time, so that no undefined symbol names them.
LOOKED_UP = {"HcclSetConfig", "HcclGetConfig", "aclrtGetSysParamOpt", "aclrtSetSysParamOpt", "aclrtCtxSetSysParamOpt"}
#: Libraries that the wheel loads beside the main one; they are empty, and bring that one in.
COMPANIONS = (
    *("libhccl", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel"),
    *("libascend_ml", "libnnopbase", "libascendsk", "libascend_dump"),
)


def build(wheel: Path, out: Path) -> None:
    """Builds the libraries."""
    out.mkdir(parents=True, exist_ok=True)
    # The wheel carries the headers of the library that it was built against.
    headers = wheel / "torch_npu/include/third_party/acl/inc"
    objects = [out / f"{Path(source).stem}.o" for source in SOURCES]
    compiling = [
        subprocess.Popen([*COMPILER, f"-I{headers}", "-c", str(HERE / source), "-o", str(target)])
        for source, target in zip(SOURCES, objects, strict=True)
    ]
    codes = [process.wait() for process in compiling]
    if any(codes):
        raise RuntimeError("the simulated device library does not compile")
    missing = _wanted(wheel, headers) - {name for path in objects for name in _symbols(path, "--defined-only")}
    blind = out / "blind.c"
    blind.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(missing)))
    _run("gcc", "-w", "-fPIC", "-c", blind, "-o", out / "blind.o")
    _library(out / "libascendcl.so", *objects, out / "blind.o", "-lpthread")
    empty = out / "empty.c"
    empty.write_text("")
    for name in COMPANIONS:
        _library(out / f"{name}.so", empty, "-Wl,--no-as-needed", out / "libascendcl.so")
    _library(out / "libopapi.so", f"-I{headers}", HERE / "operators.cpp", f"-L{out}", "-lascendcl")
    _library(out / "liballocator_keys.so", HERE / "allocator_keys.cpp")


def _wanted(wheel: Path, headers: Path) -> set[str]:
    names = set(LOOKED_UP)
    for library in (*wheel.glob("torch_npu/lib/*.so"), *wheel.glob("torch_npu/_C*.so")):
        undefined = _symbols(library, "-D", "--undefined-only")
        names |= {name for name in undefined if re.match(r"acl|rt[A-Z]|Msprof|Hccl|hccl", name)}
    for header in (headers / "acl").rglob("*.h"):
        text = header.read_text(errors="replace")
        names |= set(re.findall(r"ACL_FUNC_VISIBILITY\s+aclError\s+(acl\w+)\s*\(", text))
    return names


def _symbols(library: Path, *options: str) -> set[str]:
    listed = subprocess.run(["nm", *options, str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


def _library(target: Path, *parts: object) -> None:
    _run(*COMPILER, "-shared", "-o", target, *parts, f"-Wl,-soname,{target.name}")


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
