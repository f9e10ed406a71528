"""Memory that a process frees stays with it."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, resource
from rayfl.memory import keep_freed

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def faults():
    '''Pages that are new to this process, in eight times twice eight megabytes.'''
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        places = [libc.malloc(8 << 20) for _ in range(2)]
        for place in places:
            libc.memset(place, 1, 8 << 20)
        for place in places:
            libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun

before = faults()
keep_freed()
faults()
print(before, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not the GNU C library")
def test_freed_memory_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 100
    assert after < before / 10


LARGE = """
import numpy as np
from rayfl.memory import keep_freed, resident

{}
array = np.ones(1 << 23)
had = resident()
del array
print(had - resident() < 32e6)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not the GNU C library")
@pytest.mark.parametrize(("call", "kept"), [("keep_freed(True)", "True"), ("keep_freed()", "False")])
def test_that_of_large_models_only_if_asked(call: str, kept: str) -> None:
    code = LARGE.format(call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == kept


GIVEN_BACK = """
import numpy as np
from rayfl.memory import give_back, keep_freed, resident

keep_freed(True)
before = resident()
array = np.ones(1 << 23)
del array
kept = resident() - before
give_back()
left = resident() - before
array = np.ones(1 << 23)
del array
print(kept > 60e6, left < 32e6, resident() - before < 32e6)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not the GNU C library")
def test_what_is_kept_can_be_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
