"""Runs that are larger than one machine's memory or patience."""
