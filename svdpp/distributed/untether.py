"""Owns the end of the bond that `tether` makes; a module that the fork server preloads last."""

from __future__ import annotations

from svdpp.distributed.process_end import outlive_parent

outlive_parent()
