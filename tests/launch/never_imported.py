"""A module that takes for ever to import: what it is preloaded into can only be killed."""

import time

time.sleep(600)
