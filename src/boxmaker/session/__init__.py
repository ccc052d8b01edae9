"""Sessions on disk: the baseline, the log, its replay."""
