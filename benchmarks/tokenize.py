"""`python benchmarks/tokenize.py`: the segment cache against a full encode. The benchmark itself is tokenizing.py.

A script puts its own folder first on the import path, so for every benchmark beside this file `import tokenize` (which
the standard library does inside `inspect` and `linecache`) would find this file. It then stands for the real one.
"""

import os
import sys

if __name__ == "tokenize":
    _real = os.path.join(os.path.dirname(os.__file__), "tokenize.py")
    with open(_real, "rb") as _file:
        exec(compile(_file.read(), _real, "exec"))

if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from benchmarks.tokenizing import main

    main()
