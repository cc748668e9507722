"""Compiles the HLSL of standard input with Microsoft's DXC, with the arguments that wgpu 30 gives it.

    python3 compile.py LIBRARY ENTRY_POINT PROFILE [OPTION...] <TEXT

LIBRARY is a `libdxcompiler.so` of DXC 1.8 or newer, PROFILE `cs_6_0` or later. Exit status: 0 if the text compiles, 1 if
DXC refuses it, 2 if DXC could not be asked; its messages go to standard error. wgpu's arguments are in wgpu-hal,
`dx12/shader_compilation.rs`.
"""

import ctypes
import sys
import uuid
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint32, c_void_p, c_wchar_p, cast

COMPILER = "73e22d93-e6ce-47f3-b5bf-f0664f39c1b0"
INTERFACE_COMPILER = "228b4687-5a6a-4730-900c-9702b2203f54"
INTERFACE_RESULT = "58346cda-dde7-4497-9461-6f87af5e0659"
CODE_PAGE_UTF8 = 65001
# Places in the method tables of IDxcCompiler3, IDxcResult and IDxcBlob.
COMPILE = 3
STATUS, OBJECT, ERRORS = 3, 4, 5
POINTER_TO_BYTES, SIZE = 3, 4


class Guid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class Source(ctypes.Structure):
    _fields_ = [("bytes", c_char_p), ("size", c_size_t), ("encoding", c_uint32)]


def guid(text):
    return byref(Guid((ctypes.c_ubyte * 16).from_buffer_copy(uuid.UUID(text).bytes_le)))


def method(instance, place, result, *types):
    """The method of a COM object at a place of its table."""
    table = cast(cast(instance, POINTER(c_void_p))[0], POINTER(c_void_p))
    function = ctypes.CFUNCTYPE(result, c_void_p, *types)(table[place])
    return lambda *arguments: function(instance, *arguments)


def give_up(reason):
    print(f"compile.py: {reason}", file=sys.stderr)
    sys.exit(2)


def check(status, what):
    if status != 0:
        give_up(f"{what}: {status & 0xFFFFFFFF:#010x}")


def content(result, place):
    """The bytes of what a result holds at a place: its object, or its errors."""
    blob = c_void_p()
    check(method(result, place, c_int32, POINTER(c_void_p))(byref(blob)), "IDxcResult")
    if not blob:
        return b""
    size = method(blob, SIZE, c_size_t)()
    return ctypes.string_at(method(blob, POINTER_TO_BYTES, c_void_p)(), size) if size else b""


def main():
    if len(sys.argv) < 4:
        give_up("LIBRARY ENTRY_POINT PROFILE [OPTION...] are needed")
    library, entry_point, profile, *options = sys.argv[1:]
    try:
        create = ctypes.CDLL(library).DxcCreateInstance
    except OSError as error:
        give_up(error)
    create.restype = c_int32
    create.argtypes = [c_void_p, c_void_p, POINTER(c_void_p)]
    compiler = c_void_p()
    check(create(guid(COMPILER), guid(INTERFACE_COMPILER), byref(compiler)), "DxcCreateInstance")

    text = sys.stdin.buffer.read()
    arguments = ["-E", entry_point, "-T", profile, "-HV", "2018", "-no-warnings", "-Ges", *options]
    result = c_void_p()
    compile_text = method(compiler, COMPILE, c_int32, POINTER(Source), POINTER(c_wchar_p), c_uint32, c_void_p, c_void_p,
                          POINTER(c_void_p))
    check(compile_text(byref(Source(text, len(text), CODE_PAGE_UTF8)), (c_wchar_p * len(arguments))(*arguments),
                       len(arguments), None, guid(INTERFACE_RESULT), byref(result)), "IDxcCompiler3::Compile")

    status = c_int32()
    check(method(result, STATUS, c_int32, POINTER(c_int32))(byref(status)), "IDxcResult::GetStatus")
    sys.stderr.buffer.write(content(result, ERRORS).rstrip(b"\0"))
    # A container of DXIL.
    sys.exit(0 if status.value == 0 and content(result, OBJECT).startswith(b"DXBC") else 1)


main()
