"""The SSE control word of the calling thread, read and set by a few bytes of machine code (x86-64 only)."""

import ctypes
import mmap
import platform

AVAILABLE = platform.machine() in ("x86_64", "AMD64") and platform.system() == "Linux"

DEFAULT = 0x1F80
ROUNDING = {"nearest": 0x0000, "down": 0x2000, "up": 0x4000, "to zero": 0x6000}
FLUSH_RESULTS, FLUSH_OPERANDS = 0x8000, 0x0040
STICKY = 0x003F

if AVAILABLE:
    # ldmxcsr [rdi]; ret and stmxcsr [rdi]; ret
    _code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    _code.write(b"\x0f\xae\x17\xc3\x0f\xae\x1f\xc3")
    _start = ctypes.addressof(ctypes.c_char.from_buffer(_code))
    _function = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint32))
    _load, _store = _function(_start), _function(_start + 4)


def control_word():
    """The control word without the sticky exception flags."""
    word = ctypes.c_uint32()
    _store(ctypes.byref(word))
    return word.value & ~STICKY


def set_control_word(value):
    _load(ctypes.byref(ctypes.c_uint32(value)))
