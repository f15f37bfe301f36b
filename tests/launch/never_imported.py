"""A module whose import takes ten minutes: a fork server that preloads it must be killed."""

import time

time.sleep(600)
