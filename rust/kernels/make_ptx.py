"""Makes fill.ptx from fill.cu.

    pip install nvidia-cuda-nvrtc-cu11==11.8.89
    python rust/kernels/make_ptx.py

The compiler is an old one on purpose: what it writes is PTX 7.8, which every driver from CUDA 11.8 on can load, for
GPUs from compute capability 7.0 on. No GPU is needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
OPTIONS = (b"--gpu-architecture=compute_70", b"--std=c++14")


def load() -> ctypes.CDLL:
    """The compiler."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("nvidia-cuda-nvrtc-cu11 is not installed")
    libraries = Path(spec.submodule_search_locations[0]) / "lib"
    return ctypes.CDLL(str(libraries / "libnvrtc.so.11.2"))


def main() -> None:
    """Compiles, and writes the code beside the source."""
    nvrtc = load()
    program = ctypes.c_void_p()
    source = (HERE / "fill.cu").read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"fill.cu", 0, None, None)
    status = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status:
        raise SystemExit(log.value.decode())
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    (HERE / "fill.ptx").write_bytes(ptx.value)


if __name__ == "__main__":
    main()
