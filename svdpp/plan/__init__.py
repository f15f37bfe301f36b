"""Plan of a run: layouts, splits, actions, costs and forecasts. Standard library only."""
