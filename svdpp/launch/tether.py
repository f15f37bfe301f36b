"""Owns the fork server's bond to its starter while it imports; a module that it preloads first.

In the seconds of importing torch the server looks at nothing, so the kernel is told to end it with
its starter. `untether`, preloaded last, takes that back: from then on the server ends by itself
when its starter is gone, and must not end with the thread that happened to start it.
"""

from __future__ import annotations

import os

from svdpp.launch.process_lifetime import end_with_parent

#: In the server's environment: its starter's process id, since that may be gone by now.
STARTER = "SVDPP_FORK_SERVER_STARTER"

if STARTER in os.environ:  # not in the starter, which takes only the name from here
    end_with_parent(int(os.environ.pop(STARTER)))
