"""Counts every byte that torch allocates on a CPU, from outside and at full speed, with a small C library.

torch's CPU allocator calls ``posix_memalign`` with an alignment of 64 bytes, and ``free``. The library replaces both. It is
compiled at run time and has to be loaded before torch, so `run_counted` starts a new Python process with it. Whatever else
allocates in this way is counted too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_MARK = "PLIMSOLL_ALLOCATIONS_COUNTED"
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

enum { SLOTS = 1 << 20, REMOVED = 1 };
static uintptr_t addresses[SLOTS];
static size_t sizes[SLOTS];
static long live, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*real_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static unsigned first_slot(uintptr_t address) { return (unsigned)((address >> 6) * 2654435761u) & (SLOTS - 1); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!real_memalign) real_memalign = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    int failed = real_memalign(out, alignment, size);
    if (failed || alignment != 64) return failed;
    pthread_mutex_lock(&lock);
    unsigned slot = first_slot((uintptr_t)*out);
    while (addresses[slot] > REMOVED) slot = (slot + 1) & (SLOTS - 1);
    addresses[slot] = (uintptr_t)*out;
    sizes[slot] = size;
    live += size;
    if (live > peak) peak = live;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *pointer) {
    if (pointer && ((uintptr_t)pointer & 63) == 0) {
        pthread_mutex_lock(&lock);
        unsigned slot = first_slot((uintptr_t)pointer);
        for (int tried = 0; addresses[slot] && tried < SLOTS; tried++, slot = (slot + 1) & (SLOTS - 1)) {
            if (addresses[slot] != (uintptr_t)pointer) continue;
            live -= sizes[slot];
            addresses[slot] = addresses[(slot + 1) & (SLOTS - 1)] ? REMOVED : 0;
            break;
        }
        pthread_mutex_unlock(&lock);
    }
    if (!real_free) real_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    real_free(pointer);
}

long counted_live_bytes(void) { return live; }
long counted_peak_bytes(void) { return peak; }
void begin_counted_peak(void) { pthread_mutex_lock(&lock); peak = live; pthread_mutex_unlock(&lock); }
"""


def run_counted(module: str, arguments: Sequence[str]) -> int | None:
    """Run ``python -m module`` with the counter loaded; its exit status, or None if this process is that run already."""
    if os.environ.get(_MARK):
        return None
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        raise SystemExit("counting allocations needs Linux and a C compiler called cc")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "counter.c"), Path(folder, "counter.so")
        source.write_text(_SOURCE, encoding="utf-8")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), _MARK: "1"}
        return subprocess.run([sys.executable, "-m", module, *arguments], env=environment).returncode


class AllocationCounter:
    """Live bytes and their peak, for a process that `run_counted` has started."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.counted_live_bytes.restype = ctypes.c_long
        self._library.counted_peak_bytes.restype = ctypes.c_long

    def live_bytes(self) -> int:
        """Bytes that torch holds now."""
        return int(self._library.counted_live_bytes())

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        self._library.begin_counted_peak()

    def peak_bytes(self) -> int:
        """The most bytes alive at once since `begin_peak`."""
        return int(self._library.counted_peak_bytes())
