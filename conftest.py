"""Loads the suite's plug-in, nothing else."""

pytest_plugins = ["conformance.plugin"]
