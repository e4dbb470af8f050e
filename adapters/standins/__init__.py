"""Stand-ins for the vendors' packages: same names and signatures, same refusals, results from the cpu kernels."""

from adapters.standins.loading import Rig, install, uninstall

__all__ = ["Rig", "install", "uninstall"]
