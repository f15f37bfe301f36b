"""Doctor, environment, cost profiling, reports and traces."""
