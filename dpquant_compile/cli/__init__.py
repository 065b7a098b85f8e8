"""The command line, `dpquant`: the entry point is in `main`, and each command has its own file."""
