"""Steps under a limit on the size of files: `engine/test_failures.py`.

python file_limit.py STORE

Prints the error.
"""

import resource
import signal
import sys

from store_driver import Driver

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
driver = Driver(sys.argv[1], {"w": ((64, 4096), "float32")}).init().steps(2)
driver.store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 4096, resource.RLIM_INFINITY))
try:
    driver.steps(2)
    driver.store.wait()
except BaseException as error:
    print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
driver.engine.close()
