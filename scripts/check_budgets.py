"""Placeholder until the rules land: checks nothing yet."""
