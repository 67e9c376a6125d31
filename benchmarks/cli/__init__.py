"""Hostile input for the command line and for the plugins that it loads."""
