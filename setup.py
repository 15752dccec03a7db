"""Build of the compiled kernels.

Every kernel family is compiled once per instruction set from one shared template. Environment variables:
``MOJOLEARN_BUILD_ONLY`` (a regular expression on module names, for work on one family), ``MOJOLEARN_DEBUG=1``
(Cython's bounds checks, assertions) and ``MOJOLEARN_SANITIZE=1`` (address and undefined-behaviour sanitizers).
"""

import os
import platform
import re
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

CORE = "mojolearn/_core"
FAMILIES = ("linalg", "layers", "attention", "mamba3", "decode")
X86_64 = platform.machine().lower() in ("x86_64", "amd64")
DEBUG = os.environ.get("MOJOLEARN_DEBUG", "") == "1"
JOBS = os.cpu_count() or 1
SANITIZE = os.environ.get("MOJOLEARN_SANITIZE", "") == "1"

# -ffp-contract=off: a product and a sum stay two roundings; fused operations are written out.
COMMON = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
COMMON += ["-Wno-unused-function", "-Wno-unused-variable", "-Wno-psabi"]
if DEBUG:
    COMMON[0] = "-O1"
else:
    COMMON.append("-g0")  # the interpreter's own flags ask for debugging symbols, which double the build
if SANITIZE:
    COMMON += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
INSTRUCTION_SETS = {"baseline": (1, [])} if X86_64 else {"baseline": (0, [])}
if X86_64:
    INSTRUCTION_SETS["avx2"] = (2, ["-mavx2", "-mfma"])
    INSTRUCTION_SETS["avx512"] = (
        3,
        ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
    )


def extension(module, source, number, flags, depends):
    return Extension(
        module,
        [source],
        include_dirs=[CORE],
        depends=depends,
        define_macros=[("MOJO_ISA", str(number))],
        extra_compile_args=COMMON + flags,
        extra_link_args=["-fsanitize=address,undefined"] if SANITIZE else [],
    )


def extensions():
    shared = [f"{CORE}/{name}" for name in sorted(os.listdir(CORE)) if name.endswith((".pxi", ".pxd", ".h"))]
    found = [
        extension(f"mojolearn._core.{name}", f"{CORE}/{name}.pyx", 1 if X86_64 else 0, [], shared)
        for name in ("_pool", "byte_planes")
    ]
    for name, (number, flags) in INSTRUCTION_SETS.items():
        for family in FAMILIES:
            source = f"{CORE}/{name}/{family}.pyx"
            found.append(extension(f"mojolearn._core.{name}.{family}", source, number, flags, shared))
    only = os.environ.get("MOJOLEARN_BUILD_ONLY")
    if only:
        found = [one for one in found if re.search(only, one.name)]
    return found


setup(
    ext_modules=cythonize(
        extensions(),
        nthreads=JOBS if sys.platform == "linux" else 0,
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,  # in every build, so that the checked one computes what the fast one does
            "freethreading_compatible": True,
            "embedsignature": True,
        },
    ),
    options={"build_ext": {"parallel": JOBS}},
)
