"""The command line: `tfp-dpvi plan | show | fit | synthesize | rehearse | report`."""

from tfp_dpvi.cli.commands import main

__all__ = ["main"]
