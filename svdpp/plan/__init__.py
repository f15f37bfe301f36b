"""The plan of a run: splits, action lists, costs, forecasts and text grids. Stdlib only."""
