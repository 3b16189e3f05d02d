"""The command line: `tfp-dpvi plan | show | fit | synthesize | rehearse | report`."""

from tfp_dpvi.cli.commands import build_parser, main

__all__ = ["build_parser", "main"]
