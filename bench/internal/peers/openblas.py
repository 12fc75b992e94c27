"""Times OpenBLAS's sgemm for bench: the peer of the matrix product.

Reads lines "M K N TRANSA TRANSB SECONDS" (TRANS as n or t, row-major operands)
and answers each with the best GFLOP/s of the calls that fit into that time.
Needs libopenblas.so.0 (Debian: libopenblas0-pthread). Set OPENBLAS_NUM_THREADS
and OPENBLAS_CORETYPE before.
"""

import ctypes
import sys
import time

import numpy as np

ROW_MAJOR, NO_TRANS, TRANS = 101, 111, 112


def main():
    lib = ctypes.CDLL("libopenblas.so.0")
    lib.openblas_get_config.restype = ctypes.c_char_p
    lib.openblas_get_corename.restype = ctypes.c_char_p
    print(lib.openblas_get_config().decode(), "core", lib.openblas_get_corename().decode(),
          "threads", lib.openblas_get_num_threads(), flush=True)
    rng = np.random.default_rng(1)
    pointer = ctypes.POINTER(ctypes.c_float)
    for line in sys.stdin:
        m, k, n, ta, tb, seconds = line.split()
        m, k, n, seconds = int(m), int(k), int(n), float(seconds)
        a = rng.standard_normal((k, m) if ta == "t" else (m, k), dtype=np.float32)
        b = rng.standard_normal((n, k) if tb == "t" else (k, n), dtype=np.float32)
        c = np.zeros((m, n), dtype=np.float32)
        args = (ROW_MAJOR, TRANS if ta == "t" else NO_TRANS, TRANS if tb == "t" else NO_TRANS, m, n, k,
                ctypes.c_float(1), a.ctypes.data_as(pointer), a.shape[1], b.ctypes.data_as(pointer), b.shape[1],
                ctypes.c_float(0), c.ctypes.data_as(pointer), n)
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            lib.cblas_sgemm(*args)
            best = min(best, time.perf_counter() - start)
        print(2e-9 * m * k * n / best, flush=True)


if __name__ == "__main__":
    main()
