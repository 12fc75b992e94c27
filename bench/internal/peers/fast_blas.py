"""Ends a peer whose PyTorch multiplies matrices with the reference BLAS: Debian's package does unless libopenblas0-pthread is
installed. It is many times slower, so a comparison with it would say nothing of PyTorch.
"""

import sys


def check():
    with open("/proc/self/maps") as maps:
        if "/blas/libblas.so" in maps.read():
            sys.exit("PyTorch uses the reference BLAS, which is many times slower: apt install libopenblas0-pthread")
