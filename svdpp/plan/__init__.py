"""Who does what, and when: splits, action lists, forecasts and pictures. Stdlib only."""
