"""Which instructions the compiled modules hold, and which of the modules are loaded before the processor is asked.

A program dies by an illegal instruction when code for a wider set runs on a processor without it.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import mojolearn
from mojolearn import _core

SOURCE = pathlib.Path(mojolearn.__file__).resolve().parents[1]
FOLDER = pathlib.Path(_core.__file__).parent
MODULES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.so"))
X86_64 = "avx2" in _core.BUILT
NEEDS_OBJDUMP = pytest.mark.skipif(
    not X86_64 or shutil.which("objdump") is None, reason="needs a build for x86-64 with its sets, and objdump"
)

# What the first x86-64 processors lack, by mnemonic: what is encoded with VEX or EVEX starts with v (but for two old
# instructions) or works on masks; the others came with SSE3 to SSE4.2 and with the bit manipulation sets.
BEYOND_BASELINE = re.compile(
    r"v(?!err\b|erw\b)\w+|k(mov|or|and|test|not|xor|shift)\w*"
    r"|addsubp[sd]|haddp[sd]|hsubp[sd]|movs[hl]dup|movddup|lddqu|fisttp\w*"
    r"|pshufb|ph(add|sub)\w+|pmaddubsw|pmulhrsw|psign[bwd]|pabs[bwd]|palignr"
    r"|pmulld|pmuldq|p(min|max)(sb|sd|uw|ud)|pmov[sz]x\w+|p?blend\w+|round[sp][sd]|ptest|dpp[sd]|insertps|extractps"
    r"|pinsr[bdq]|pextr[bdq]|packusdw|pcmp(eq|gt)q|mpsadbw|phminposuw|pcmp[ei]str[im]"
    r"|crc32\w*|popcnt|andn|bextr|bls\w+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|movbe"
)
INSTRUCTION = re.compile(
    r"^ +[0-9a-f]+:\t(?:(?:lock|rep|repz|repnz|bnd|notrack|data16|cs|ds) )*(\S+) *([^\n#]*)", re.MULTILINE
)


def disassembly(module):
    """(mnemonic, operands) of every instruction."""
    command = ["objdump", "-d", "--no-show-raw-insn", FOLDER / module]
    return INSTRUCTION.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def beyond_baseline(module):
    return sorted({name for name, _ in disassembly(module) if BEYOND_BASELINE.fullmatch(name)})


@NEEDS_OBJDUMP
@pytest.mark.parametrize("module", MODULES)
def test_instructions_of_a_module(module):
    code = disassembly(module)
    assert len(code) > 1000
    wide = {register for _, operands in code for register in re.findall(r"%([yz]mm|k[0-7])", operands)}
    upper = any(re.search(r"%[xy]mm(1[6-9]|2\d|3[01])\b", operands) for _, operands in code)
    if module.startswith("avx512/"):
        assert "zmm" in wide
    elif module.startswith("avx2/"):
        assert wide == {"ymm"}
        assert not upper
    else:
        assert wide == set()
        assert beyond_baseline(module) == []


@NEEDS_OBJDUMP
def test_the_check_sees_wider_sets():
    wider = [module for module in MODULES if module.startswith("avx2/")]
    assert len(wider) >= 5
    assert all(beyond_baseline(module) for module in wider)
    assert BEYOND_BASELINE.fullmatch("vfmadd231ps")
    assert BEYOND_BASELINE.fullmatch("roundps")
    assert not BEYOND_BASELINE.fullmatch("verr")
    assert not BEYOND_BASELINE.fullmatch("pextrw")


def python(program, **environment):
    environment = {**os.environ, **environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), environment.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


# Kernels are modules like mojolearn._core.avx2.linalg.
LOADED = """
import json, sys, mojolearn
kernels = [name for name in sys.modules if name.startswith("mojolearn._core.") and name.count(".") == 3]
print(json.dumps(kernels))
"""


@pytest.mark.parametrize("name", [name for name in _core.BUILT if name in _core.AVAILABLE])
def test_only_the_chosen_set_is_loaded(name):
    done = python(LOADED, MOJOLEARN_ISA=name)
    assert done.returncode == 0, done.stderr
    assert {module.split(".")[2] for module in json.loads(done.stdout)} == {name}


# The check of the processor, taken in by a processor with less, before anything of the library is imported.
LESSER = """
import importlib.util, sys, types
spec = importlib.util.find_spec("mojolearn")
package = types.ModuleType("mojolearn")
package.__path__ = list(spec.submodule_search_locations)
sys.modules["mojolearn"] = package
core = types.ModuleType("mojolearn._core")
core.__path__ = [package.__path__[0] + "/_core"]
sys.modules["mojolearn._core"] = core
import mojolearn._core._pool as pool
pool.cpu_instruction_sets = lambda: {sets}
del sys.modules["mojolearn"], sys.modules["mojolearn._core"]
import mojolearn
kernels = [name for name in sys.modules if name.startswith("mojolearn._core.") and name.count(".") == 3]
print(mojolearn.show_config(quiet=True)["isa"], *sorted({{name.split(".")[2] for name in kernels}}))
"""


@pytest.mark.skipif(not X86_64, reason="needs a build for x86-64 with its instruction sets")
@pytest.mark.parametrize("sets", [("baseline",), ("baseline", "avx2")])
def test_a_processor_with_less(sets):
    done = python(LESSER.format(sets=sets), MOJOLEARN_ISA="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [sets[-1], sets[-1]]
    for name in {"avx2", "avx512"} - set(sets):
        done = python(LESSER.format(sets=sets), MOJOLEARN_ISA=name)
        assert done.returncode != 0
        message = done.stderr.strip().splitlines()[-1]
        assert message == (
            f"RuntimeError: MOJOLEARN_ISA asks for {name}, which this CPU lacks; it has {', '.join(sets)}"
        )


def test_an_unknown_set_is_refused():
    done = python("import mojolearn", MOJOLEARN_ISA="neon2")
    assert done.returncode != 0
    assert "MOJOLEARN_ISA is 'neon2'; wanted one of baseline, avx2, avx512" in done.stderr
