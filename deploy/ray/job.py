"""A fleet as a Ray job. The job ends when the fleet serves; the fleet stays until `fleet down`.

ray job submit --address http://HEAD:8265 --working-dir deploy/ray -- python job.py MODEL --replicas 8 --routers 2

Every node needs blockcast (an image with it, or `--runtime-env-json '{"pip": ["blockcast[engine,ray]"]}'`) and MODEL.
"""

import sys

from fleet.cli import main

if __name__ == "__main__":
    main(["up", *sys.argv[1:]])
