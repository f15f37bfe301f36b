"""Plan of a run: layouts, splits, actions, costs and forecasts.

The modules import only each other, `svdpp.errors` and the standard library.
"""
