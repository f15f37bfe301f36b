"""Doctor, environment report, cost profiling, run reports and trace files."""
